"""Named verifiers as plain functions of one sample."""

import logging
import re
from collections.abc import Callable
from typing import Any

from rlhf.config.schema.reward import RewardConfig
from rlhf.reward.scores import RewardItem, Score

log = logging.getLogger(__name__)

GYM_PREFIX = "reasoning_gym/"
_COMPUTES = re.compile(r"\b(eval|exec|parse_expr|sympify|Fraction)\(|\] \* int\(")
_gym_datasets: dict[str, Any] = {}
Reader = Callable[[str], str]
"""Turns a response into the answer that it states, for the vote of the majority."""


def final_answer(text: str) -> str:
    r"""The part of a solution that states the answer, with white space normalised.

    That is the text after the last `####` (as in GSM8K; to the end of its line) or inside the last `\boxed{}` (as in
    MATH), whichever starts later; the whole text if it has neither. Case matters.
    """
    mark, box = text.rfind("####"), text.rfind("\\boxed{")
    if mark > box:
        lines = text[mark + 4 :].strip().splitlines()
        text = lines[0] if lines else ""
    elif box >= 0:
        text = _braced(text[box + len("\\boxed{") :])
    return " ".join(text.split())


def _braced(text: str) -> str:
    """`text` up to the brace that closes the one already open; all of it if none does."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    return text


def accepted(ground_truth: Any) -> list[str]:
    """The reference answers; a list in the data means any of them."""
    answers = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return [final_answer(str(answer)) for answer in answers]


def exact_match(item: RewardItem) -> Score:
    """1 if the response's `final_answer` is one of the reference's, else 0."""
    return Score(float(final_answer(item.response) in accepted(item.ground_truth)))


def math_verify(item: RewardItem) -> Score:
    """1 if math-verify finds the response's answer equal to a reference one, else 0.

    Runs without the library's own alarms: they count per expression; only the process's deadline counts per sample.
    """
    from math_verify import parse, verify

    def matches(gold: str) -> bool:
        # The library's advice: the reference as LaTeX in an environment; verify(gold, answer), in that order.
        return bool(verify(parse(f"\\boxed{{{gold}}}", parsing_timeout=None), answer, timeout_seconds=None))

    answer = parse(item.response, parsing_timeout=None)
    return Score(float(any(matches(gold) for gold in accepted(item.ground_truth))))


def reasoning_gym(item: RewardItem) -> Score:
    """`score_answer` of the task that made the problem, on the stripped response.

    The library's verifiers raise on answers that they cannot read; such an answer is wrong and counted.
    """
    entry = {
        "question": item.extra_info["question"],
        "answer": item.ground_truth,
        "metadata": item.extra_info["metadata"],
    }
    dataset = gym_dataset(item.data_source, item.extra_info.get("config") or {})
    try:
        score = float(dataset.score_answer(item.response.strip(), entry))
    except MemoryError:
        raise  # of a reward process' limit
    except Exception:
        log.debug("%s cannot read the answer %r", item.data_source, item.response, exc_info=True)
        return Score(0.0, {"unreadable": 1.0})
    return Score(score, {"unreadable": 0.0})


def gym_dataset(data_source: str, settings: dict[str, Any]) -> Any:
    """The library's object for `reasoning_gym/<task>`, made once for each task and settings."""
    key = f"{data_source} {settings!r}"
    if key not in _gym_datasets:
        from reasoning_gym import create_dataset

        _gym_datasets[key] = create_dataset(data_source.removeprefix(GYM_PREFIX), seed=0, size=1, **settings)
    return _gym_datasets[key]


def evaluates_answers(data_source: str, settings: dict[str, Any]) -> bool:
    """Whether the task computes what an answer says.

    Several do, by eval(), SymPy's parser or a number that the answer names. A policy's "9**9**9**9" or "1e999999999"
    never returns there, and "R99999999999" takes all memory: they need a process that can be killed.
    """
    import inspect

    # The whole class: what scores may stand in another method.
    source = inspect.getsource(type(gym_dataset(data_source, settings)))
    return _COMPUTES.search(source) is not None


def answer_reader(config: RewardConfig) -> Reader | None:
    """Reader of answers as the first of `reward.functions` reads them, where it is a named verifier; None elsewhere:
    only a function's author knows what it reads, and a reward model reads no answer."""
    first = config.functions[0]
    if first in ("exact_match", "math_verify"):
        return final_answer
    return str.strip if first == "reasoning_gym" else None
