"""Shapes rewards: DAPO's soft penalty for over-long responses."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return min(-(L - (max_length - buffer)) / buffer * factor, 0) for responses of `lengths` L, [N] float32.

    The penalty falls from 0 to -factor over the last `buffer` tokens before `max_length`, the limit of a response.

    Source: DAPO (arXiv 2503.14476) equation 13.
    """
    room = (max_length - buffer) - lengths.float()
    return (room / buffer * factor).clamp(max=0)
