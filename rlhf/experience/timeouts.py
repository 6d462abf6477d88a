"""Logs time-outs of reward functions: one line for all samples of a step, over all ranks."""

import logging
from collections.abc import Sequence

from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import Timeouts, merge_timeouts

log = logging.getLogger(__name__)


def tell_timeouts(when: str, mine: Sequence[Timeouts], coordinator: Coordinator) -> None:
    """Log on the leader which reward functions timed out on any rank, with a count and one sample each. Collective."""
    every = merge_timeouts(each for of_rank in coordinator.gather(list(mine)) for each in of_rank)
    if every and coordinator.is_leader:
        log.warning("%s: %s", when, "; ".join(map(str, every)))
