"""Collates groups into the tensors of a rollout batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.batch import RolloutBatch
from rlhf.experience.groups import Group


def collate(groups: Sequence[Group], pad_id: int, version: int, device: torch.device) -> RolloutBatch:
    """Return the samples of `groups` as a batch, in the order of the groups. Without groups, the batch has no rows.

    The scores include the over-long penalty. `version` is the number of training steps so far; a token's staleness
    is `version` minus the version of the policy that drew the token. `pad_id` is the token id of the padding.
    """
    rows = [(group, sample) for group in groups for sample in group.samples]
    prompts = [len(group.prompt_ids) for group, _ in rows]
    responses = [len(sample) for _, sample in rows]
    longest = max(map(sum, zip(prompts, responses, strict=True)), default=0)
    input_ids = np.full((len(rows), longest), pad_id, np.int32)
    log_probs = np.zeros((len(rows), max(responses, default=0)), np.float32)
    mask = np.zeros(log_probs.shape, np.bool_)
    staleness = np.zeros(log_probs.shape, np.int32)
    for row, (group, sample) in enumerate(rows):
        start, length = prompts[row], responses[row]
        input_ids[row, :start] = group.prompt_ids
        input_ids[row, start : start + length] = sample.token_ids
        log_probs[row, :length] = sample.log_probs
        mask[row, :length] = sample.mask()
        first = 0
        for drawn_by, end in sample.versions:
            staleness[row, first:end] = version - drawn_by
            first = end

    def tensor(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    failed = [sample.finish_reason == "failed" for _, sample in rows]
    baselines = [group.baseline for group, _ in rows]
    return RolloutBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        prompt_lengths=tensor(prompts, torch.int64),
        response_lengths=tensor(responses, torch.int64),
        response_mask=torch.from_numpy(mask).to(device),
        rollout_log_probs=torch.from_numpy(log_probs).to(device),
        scores=tensor([score for group in groups for score in group.scores], torch.float32),
        baselines=None if None in baselines else tensor(baselines, torch.float32),
        failed=tensor(failed, torch.bool) if any(failed) else None,
        truncated=tensor([sample.finish_reason == "length" for _, sample in rows], torch.bool),
        uids=tensor([group.uid for group, _ in rows], torch.int64),
        numbers=tensor([sample.sample for _, sample in rows], torch.int64),
        staleness=torch.from_numpy(staleness).to(device),
    )
