"""Collation of groups into the tensors of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.batch import Batch
from rlhf.experience.groups import Group
from rlhf.rollout import Sample


def collate(groups: Sequence[Group], pad_id: int, version: int, device: torch.device) -> Batch:
    """The samples of `groups`, one group after the other, padded with `pad_id`, with their whole rewards as scores. No
    groups are a batch without rows.

    `version` is the steps that the policy has done.
    """
    rows = [(group, sample) for group in groups for sample in group.samples]

    def tensor(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    baselines = [group.baseline for group, _ in rows]
    lengths = tensor([len(sample.token_ids) for _, sample in rows], torch.int64)
    sequences = [torch.tensor(group.prompt_ids + sample.token_ids, dtype=torch.int64) for group, sample in rows]
    log_probs = [torch.tensor(sample.log_probs, dtype=torch.float32) for _, sample in rows]
    return Batch(
        input_ids=_padded(sequences, torch.int64, pad_id).to(device),
        prompt_lengths=tensor([len(group.prompt_ids) for group, _ in rows], torch.int64),
        response_lengths=lengths,
        response_mask=_mask([sample for _, sample in rows], lengths),
        rollout_log_probs=_padded(log_probs, torch.float32).to(device),
        scores=tensor([score for group in groups for score in group.scores], torch.float32),
        baselines=None if None in baselines else tensor(baselines, torch.float32),
        truncated=tensor([sample.finish_reason == "length" for _, sample in rows], torch.bool),
        uids=tensor([group.uid for group, _ in rows], torch.int64),
        numbers=tensor([sample.sample for _, sample in rows], torch.int64),
        staleness=tensor([version - sample.version for _, sample in rows], torch.int64),
    )


def _padded(rows: list[Tensor], dtype: torch.dtype, value: float = 0.0) -> Tensor:
    """[N, longest], the rows padded on the right with `value`; without rows [0, 0]."""
    return pad_sequence(rows, batch_first=True, padding_value=value) if rows else torch.empty(0, 0, dtype=dtype)


def _mask(samples: Sequence[Sample], lengths: Tensor) -> Tensor:
    """[N, R] float32, 1 on what the policy wrote; `lengths` [N] are those of the responses."""
    columns = torch.arange(max((len(sample.token_ids) for sample in samples), default=0), device=lengths.device)
    mask = (columns < lengths[:, None]).float()
    for row, sample in enumerate(samples):
        for start, end in sample.observations:
            mask[row, start:end] = 0.0
    return mask
