"""Warns of reference answers that are numbers, which users' reward functions may compare with text."""

import logging
from collections.abc import Sequence

from rlhf.data.prompts import PromptSet

log = logging.getLogger(__name__)


def warn_of_numbers(prompts: PromptSet, setting: str, functions: Sequence[str]) -> None:
    """Log a warning if the first reference answer is a number and a reward function is in a file of the user.

    A function that compares 42 with "42" gives every response a low reward, without a message.
    """
    answer = prompts[0].ground_truth
    own = [each for each in functions if ".py:" in each]
    if own and isinstance(answer, int | float) and not isinstance(answer, bool):
        log.warning(
            "%s: the reference answers are numbers (%s), and %s receives them as numbers. Compare with "
            "str(ground_truth), or write the answers in quotes.",
            setting,
            type(answer).__name__,
            ", ".join(own),
        )
