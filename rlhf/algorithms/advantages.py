"""From rewards to advantages."""

import torch
from torch import Tensor

EPSILON = 1e-6


def grpo(scores: Tensor, group_size: int, *, norm_by_std: bool = True) -> Tensor:
    """Group-relative advantages, one per response.

    Args:
        scores: summed reward of each response, shape [groups * group_size], groups contiguous.
        group_size: responses per prompt.
        norm_by_std: divide by the group's unbiased standard deviation plus 1e-6; false is Dr.GRPO.

    Returns:
        [groups * group_size]. A group of one keeps mean 0 and deviation 1, so its advantage is its score.

    Source: DeepSeekMath (arXiv 2402.03300) section 4.1.2; Dr.GRPO (arXiv 2503.20783) section 3.2 for `norm_by_std=False`.
    """
    # In float64, or the rounded mean of equal rewards would leave differences that the division blows up.
    groups = scores.double().view(-1, group_size)
    if group_size == 1:
        mean, deviation = torch.zeros_like(groups), torch.ones_like(groups)
    else:
        mean, deviation = groups.mean(dim=1, keepdim=True), groups.std(dim=1, keepdim=True)
    centred = groups - mean
    if norm_by_std:
        centred = centred / (deviation + EPSILON)
    return centred.view(-1).to(scores.dtype)
