"""Time-outs of reward functions in the log: one line for all samples of a step, over all ranks."""

import logging
from collections.abc import Sequence

from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import Timeouts, merge_timeouts

log = logging.getLogger(__name__)


def tell_timeouts(when: str, mine: Sequence[Timeouts], coordinator: Coordinator) -> None:
    """Log what took too long on any rank, with a count and one sample for each function, on the leader. Collective."""
    every = merge_timeouts(each for of_rank in coordinator.gather(list(mine)) for each in of_rank)
    if every and coordinator.is_leader:
        log.warning("%s: %s", when, "; ".join(map(str, every)))
