"""Collates groups into the tensors of a rollout batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.batch import RolloutBatch
from rlhf.experience.groups import Group


def collate(groups: Sequence[Group], pad_id: int, version: int, device: torch.device) -> RolloutBatch:
    """Return the rows of `groups` as a batch, in the order of the groups. Without groups, the batch has no rows.

    The scores include the over-long penalty. `version` is the number of training steps so far; a token's staleness
    is `version` minus the version of the policy that drew the token. `pad_id` is the token id of the padding.
    """
    samples = [(group, sample) for group in groups for sample in group.samples]
    rows = [row for group in groups for row in group.rows]
    prompts = [len(row.prompt_ids) for row in rows]
    responses = [len(row.response) for row in rows]
    longest = max(map(sum, zip(prompts, responses, strict=True)), default=0)
    input_ids = np.full((len(rows), longest), pad_id, np.int32)
    log_probs = np.zeros((len(rows), max(responses, default=0)), np.float32)
    mask = np.zeros(log_probs.shape, np.bool_)
    staleness = np.zeros(log_probs.shape, np.int32)
    for row, (prompt_ids, sample) in enumerate(rows):
        start, length = prompts[row], responses[row]
        input_ids[row, :start] = prompt_ids
        input_ids[row, start : start + length] = sample.token_ids
        log_probs[row, :length] = sample.log_probs
        mask[row, :length] = sample.mask()
        first = 0
        for drawn_by, end in sample.versions:
            staleness[row, first:end] = version - drawn_by
            first = end

    def tensor(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    failed = [sample.finish_reason == "failed" for _, sample in samples]
    baselines = [group.baseline for group, _ in samples]
    owners = [i for i, (_, sample) in enumerate(samples) for _ in range(1 + len(sample.forks))]
    return RolloutBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        prompt_lengths=tensor(prompts, torch.int64),
        response_lengths=tensor(responses, torch.int64),
        response_mask=torch.from_numpy(mask).to(device),
        rollout_log_probs=torch.from_numpy(log_probs).to(device),
        scores=tensor([score for group in groups for score in group.scores], torch.float32),
        baselines=None if None in baselines else tensor(baselines, torch.float32),
        failed=tensor(failed, torch.bool) if any(failed) else None,
        truncated=tensor([sample.finish_reason == "length" for _, sample in samples], torch.bool),
        samples=tensor(owners, torch.int64) if len(rows) > len(samples) else None,
        uids=tensor([row.response.uid for row in rows], torch.int64),
        numbers=tensor([row.response.sample for row in rows], torch.int64),
        staleness=torch.from_numpy(staleness).to(device),
    )


def mask_width(groups: Sequence[Group]) -> int:
    """Return the largest number of tokens that any sampling mask keeps; 0 without sampling masks."""
    masks = [sample.sampling_mask for group in groups for sample in group.samples]
    return max((mask.width for mask in masks if mask is not None), default=0)


def collate_masks(groups: Sequence[Group], width: int, batch: RolloutBatch) -> Tensor | None:
    """Return `RolloutBatch.sampling_mask`, [N, R, width] int32, of the `batch` of `groups`; None if `width` is 0.

    `width` is the largest `mask_width` of all ranks, because ranks exchange rows of their batches.
    """
    if not width:
        return None
    masks = np.full((*batch.response_mask.shape, width), -1, np.int32)
    for row, (_, sample) in enumerate(row for group in groups for row in group.rows):
        if sample.sampling_mask is not None:
            masks[row, : len(sample)] = sample.sampling_mask.rows(width)
    return torch.from_numpy(masks).to(batch.input_ids.device)
