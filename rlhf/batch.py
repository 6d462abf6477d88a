"""Batches of one step's samples as tensors, by stage: from rollouts, for the actor, for the critic."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Batch:
    """N samples of one rank: what models read, and by which policy each sample is.

    Sequences are prompt + response, padded on the right to L; R is the longest response. Per-token tensors of shape
    [N, R] are aligned to the response: column 0 is its first token.
    """

    input_ids: Tensor
    """[N, L] int64."""
    prompt_lengths: Tensor
    """[N] int64."""
    response_lengths: Tensor
    """[N] int64, end-of-sequence included: what pads. Which of these tokens count is the mask's business."""
    response_mask: Tensor
    """[N, R] float32, 1 on the tokens that the policy wrote; 0 on padding, and on what a tool or an environment wrote
    between them."""
    rollout_log_probs: Tensor
    """[N, R] float32, by the engine, of the distribution that it sampled from."""
    uids: Tensor
    """[N] int64: the prompts' places in the stream. With `numbers` what tells a sample from all others of its step."""
    numbers: Tensor
    """[N] int64: which of its prompt's samples each is."""
    staleness: Tensor | None = None
    """[N] int64: steps between the policy that sampled and the one before the update; None when that is 0 for every
    sample on every rank."""

    @property
    def counted(self) -> Tensor:
        """[N, R] float32, 1 on the tokens that the loss counts."""
        return self.response_mask

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def present(self) -> dict[str, Tensor]:
        """The tensors by field, but for those that this step has not."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def select(self, rows: Tensor | slice) -> Self:
        """The given rows, trimmed to their longest sequence and longest response; perhaps none."""
        picked = {name: value[rows] for name, value in self.present().items()}
        responses = picked["response_lengths"]
        length = int((picked["prompt_lengths"] + responses).max()) if len(responses) else 0
        response = int(responses.max()) if len(responses) else 0
        for name, value in picked.items():
            if value.dim() == 2:
                picked[name] = value[:, : length if name == "input_ids" else response]
        return replace(self, **picked)

    def micro_batch(self, rows: Sequence[int]) -> Self:
        """The given rows; for none of them a filler: one sample of one token without a response, which goes through a
        model with the other ranks' micro-batches and adds nothing."""
        if rows:
            return self.select(torch.tensor(rows, device=self.input_ids.device))
        empty = {name: value.new_zeros((1, 0) if value.dim() == 2 else 1) for name, value in self.present().items()}
        one = {"input_ids": self.input_ids.new_zeros(1, 1), "prompt_lengths": self.prompt_lengths.new_ones(1)}
        return replace(self, **empty | one)


@dataclass(kw_only=True)
class RolloutBatch(Batch):
    """Samples where they were generated and scored, groups contiguous."""

    scores: Tensor
    """[N] float32: the whole reward of each response, over-long punishment included."""
    truncated: Tensor
    """[N] bool: responses that the limit of tokens has cut off."""
    baselines: Tensor | None = None
    """[N] float32: the whole reward of the greedy response to the same prompt; None if the estimator needs none."""


@dataclass(kw_only=True)
class ActorBatch(Batch):
    """Samples where the actor learns from them."""

    advantages: Tensor
    """[N, R] float32, zero outside the mask."""
    loss_mask: Tensor
    """[N, R] float32, 1 on those tokens of the mask that the policy's loss counts."""
    old_log_probs: Tensor | None
    """[N, R] float32 by the training engine before the first update; None when the update itself is the first look."""
    ref_log_probs: Tensor | None
    """[N, R] float32; None without a reference."""
    chosen: Tensor | None = None
    """[N, R] float32, 1 on the tokens of a mini-batch that the policy loss treats otherwise; None but in its update."""

    @property
    def counted(self) -> Tensor:
        """See `Batch.counted`."""
        return self.loss_mask


@dataclass(kw_only=True)
class CriticBatch(Batch):
    """Samples where the critic learns from them."""

    values: Tensor
    """[N, R] float32 by the critic before the update."""
    returns: Tensor
    """[N, R] float32, its targets."""


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a batch over all ranks."""

    total: int
    """Of prompts and responses."""
    responses: int
    """Those that the policy wrote."""
    squares: int
    """Sum of the squared lengths of the samples, with which the cost of attention grows."""
