"""Shaping of rewards: the soft punishment of over-long responses."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """DAPO's soft over-long punishment: min(-(L - (max_length - buffer)) / buffer * factor, 0).

    Args:
        lengths: [N], tokens of each response.
        max_length: tokens of the longest response allowed, where the punishment is -factor.
        buffer: tokens before that over which it grows from 0.

    Returns:
        [N] float32, zero or negative.

    Source: DAPO (arXiv 2503.14476) equation 13.
    """
    room = (max_length - buffer) - lengths.float()
    return (room / buffer * factor).clamp(max=0)
