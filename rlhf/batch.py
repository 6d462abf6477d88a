"""Defines the tensors of a step's samples, one class per stage: after the rollouts, for the actor, for the critic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor


@dataclass(kw_only=True)
class Batch:
    """N rows of one rank: the fields that every stage has.

    A row is a sample. If an agent rewrote its history, the sample has several rows (`Sample.forks`).

    Sequences are prompt + response, padded on the right to L tokens. R is the length of the longest response. Column 0
    of a tensor of shape [N, R] is the first token of the response.
    """

    input_ids: Tensor
    """[N, L] int32: half of int64's memory and traffic; `PredictedTokens` converts the ids of a micro-batch."""
    prompt_lengths: Tensor
    """[N] int64."""
    response_lengths: Tensor
    """[N] int64: response tokens before the padding, with end-of-sequence and observations."""
    response_mask: Tensor
    """[N, R] bool: True on tokens that the policy wrote, not on padding or on observations of a tool or environment."""
    rollout_log_probs: Tensor
    """[N, R] float32: log-probs by the rollout engine, under the distribution that it sampled from."""
    uids: Tensor
    """[N] int64: position of each row's prompt in the stream. `uids` and `numbers` together identify a row."""
    numbers: Tensor
    """[N] int64: number of each row among the rows of its prompt; a sample's first row has the sample's number."""
    staleness: Tensor | None = None
    """[N, R] int32: steps from the policy that drew each token to the policy before this update, 0 on padding; None if
    all are 0 on all ranks. The tokens of one response may differ (partial rollouts)."""
    sampling_mask: Tensor | None = None
    """[N, R, K] int32: ids of the tokens among which each token was sampled, padded with -1 (`SamplingMask`). Log-probs
    are renormalized over them; only -1 stands for the whole vocabulary. Undefined outside `response_mask`. None if no
    rank's samples have masks."""

    @property
    def counted(self) -> Tensor:
        """[N, R] bool: True on the tokens that the loss counts."""
        return self.response_mask

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def present(self) -> dict[str, Tensor]:
        """Return the tensors by field name, without the fields that are None."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    @cached_property
    def sizes(self) -> np.ndarray:
        """[3, N] int64, per row: tokens of the prompt, of the response, and in `response_mask`.

        The host needs the sizes to choose shapes. It waits for the device once per batch, to copy the sizes, and never
        for a micro-batch. Nothing may change the lengths or the mask of a batch; `replace` makes another batch.
        """
        return torch.stack([self.prompt_lengths, self.response_lengths, self.response_mask.sum(dim=1)]).cpu().numpy()

    def select(self, rows: Tensor | slice) -> Self:
        """Return the given rows, possibly none, trimmed to their longest sequence and longest response.

        `rows` is on the host.
        """
        sizes = self.sizes[:, rows if isinstance(rows, slice) else rows.numpy()]
        # Do not block, because a blocking transfer waits for all earlier work of the device.
        here = rows if isinstance(rows, slice) else rows.to(self.input_ids.device, non_blocking=True)
        picked = {name: value[here] for name, value in self.present().items()}
        length, response = (int(each.max(initial=0)) for each in (sizes[0] + sizes[1], sizes[1]))
        for name, value in picked.items():
            if value.dim() > 1:
                picked[name] = value[:, : length if name == "input_ids" else response]
        selected = replace(self, **picked)
        selected.sizes = sizes
        return selected

    def micro_batch(self, rows: Sequence[int]) -> Self:
        """Return the given rows, or a filler if there are none: one sample of one token without a response.

        A rank without samples passes the filler through the model while other ranks compute their micro-batches. The
        filler adds nothing to a loss.
        """
        if rows:
            return self.select(torch.tensor(rows))
        present = self.present().items()
        empty = {name: value.new_zeros((1, 0, *value.shape[2:])[: value.dim()]) for name, value in present}
        one = {"input_ids": self.input_ids.new_zeros(1, 1), "prompt_lengths": self.prompt_lengths.new_ones(1)}
        return replace(self, **empty | one)


@dataclass(kw_only=True)
class RolloutBatch(Batch):
    """Rollout batch: S samples on the rank that generated and scored them. The samples of a group are contiguous."""

    scores: Tensor
    """[S] float32: total reward of each response, over-long penalty included."""
    truncated: Tensor
    """[S] bool: whether the limit of tokens cut off the response."""
    baselines: Tensor | None = None
    """[S] float32: total reward of the greedy response to the same prompt; None if the estimator needs none."""
    failed: Tensor | None = None
    """[S] bool: whether a response has no tokens and no score because its environment failed; None if none failed."""
    samples: Tensor | None = None
    """[N] int64: index of each row's sample, ascending; None if each row is a sample."""

    @property
    def has_score(self) -> Tensor:
        """[S] bool: whether each response has a score."""
        return torch.ones_like(self.scores, dtype=torch.bool) if self.failed is None else ~self.failed


@dataclass(kw_only=True)
class ActorBatch(Batch):
    """Training batch of the actor."""

    advantages: Tensor
    """[N, R] float32: zero outside `response_mask`."""
    loss_mask: Tensor
    """[N, R] bool: True on the tokens of `response_mask` that the policy loss counts."""
    old_log_probs: Tensor | None
    """[N, R] float32: log-probs by the training engine before the first update; None if the update computes them."""
    ref_log_probs: Tensor | None
    """[N, R] float32: log-probs by the reference policy; None without a reference."""
    chosen: Tensor | None = None
    """[N, R] float32: 1 on the tokens that `clip_cov` or `kl_cov` treat specially; None with other policy losses."""

    @property
    def counted(self) -> Tensor:
        return self.loss_mask


@dataclass(kw_only=True)
class CriticBatch(Batch):
    """Training batch of the critic."""

    values: Tensor
    """[N, R] float32: values by the critic before the update."""
    returns: Tensor
    """[N, R] float32: the critic's targets."""


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a step's samples over all ranks."""

    total: int
    """Tokens of prompts and responses."""
    responses: int
    """Tokens that the policy wrote."""
    squares: int
    """Sum of the squared lengths of the samples, to which the cost of attention is proportional."""
    beyond: Mapping[int, int] = field(default_factory=dict)
    """For each sliding window: the sum, over samples, of the squared number of tokens beyond the window. The cost
    of attention with the window is proportional to `squares` minus this sum."""
