"""Answers that responses state, for the vote of the majority."""

from collections.abc import Callable

from rlhf.config.schema.reward import RewardConfig
from rlhf.reward.verifiers import final_answer

Reader = Callable[[str], str]
"""Turns a response into the answer that it states."""


def answer_reader(config: RewardConfig) -> Reader | None:
    """Reader of answers as the first of `reward.functions` reads them, where it is a named verifier; None elsewhere:
    only a function's author knows what it reads, and a reward model reads no answer."""
    first = config.functions[0]
    if first in ("exact_match", "math_verify"):
        return final_answer
    return str.strip if first == "reasoning_gym" else None
