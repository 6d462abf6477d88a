"""Defines the named verifiers as plain functions of one sample."""

import logging
from collections.abc import Callable
from typing import Any

from rlhf.config.schema.reward import RewardConfig
from rlhf.reward.scores import RewardItem, Score

log = logging.getLogger(__name__)

GYM_PREFIX = "reasoning_gym/"
_COMPARES_DECIMALS = ("chain_sum", "products")
"""Tasks whose `score_answer` compares two decimals. Its time is linear in the answer's length."""
_COMPARES_BOARDS = ("arc_agi", "rearc")
"""Tasks whose `score_answer` compares the answer, as a tuple of tuples, with `metadata["output"]`."""
_gym_datasets: dict[str, Any] = {}
Reader = Callable[[str], str]
"""Extracts the answer from a response, for the majority vote."""


def final_answer(text: str) -> str:
    r"""Return the part of a solution that states the answer, with white space normalized.

    The answer is the text after the last `####` (as in GSM8K; to the end of its line) or inside the last `\boxed{}` (as
    in MATH), whichever starts later; otherwise the whole text. Case matters.
    """
    mark, box = text.rfind("####"), text.rfind("\\boxed{")
    if mark > box:
        lines = text[mark + 4 :].strip().splitlines()
        text = lines[0] if lines else ""
    elif box >= 0:
        text = _braced(text[box + len("\\boxed{") :])
    return " ".join(text.split())


def _braced(text: str) -> str:
    """Return `text`, which follows an opening brace, up to its closing brace; all of `text` if there is none."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    return text


def reference_answers(ground_truth: Any) -> list[str]:
    """Return the final answers of `ground_truth`. If it is a list, any of them counts as correct.

    A column of whole numbers with missing values has floats in pandas, so 42.0 is also "42".
    """
    answers = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    whole = [str(int(answer)) for answer in answers if isinstance(answer, float) and answer.is_integer()]
    return [final_answer(str(answer)) for answer in answers] + whole


def exact_match(item: RewardItem) -> Score:
    """Return 1 if the response's `final_answer` is one of the `reference_answers`, else 0."""
    return Score(float(final_answer(item.answer) in reference_answers(item.ground_truth)))


def math_verify(item: RewardItem) -> Score:
    """Return 1 if math-verify finds the response's answer equal to a reference answer, else 0.

    math-verify's own timeouts are off, because they limit single expressions; the reward process has a deadline for the
    whole sample.
    """
    from math_verify import parse, verify

    def matches(gold: str) -> bool:
        # math-verify's docs: put the reference into a LaTeX environment, and pass the reference to `verify` first.
        return bool(verify(parse(f"\\boxed{{{gold}}}", parsing_timeout=None), answer, timeout_seconds=None))

    answer = parse(item.answer, parsing_timeout=None)
    return Score(float(any(matches(gold) for gold in reference_answers(item.ground_truth))))


def reasoning_gym(item: RewardItem) -> Score:
    """Score the stripped response with `score_answer` of the task that generated the problem.

    reasoning-gym's verifiers raise on answers that they cannot read. Such an answer scores 0 and counts as unreadable.
    """
    entry = {"question": item.extra_info["question"], "answer": item.ground_truth}
    metadata = item.extra_info["metadata"]
    dataset = gym_dataset(item.data_source, item.extra_info.get("config") or {})
    try:
        if metadata.get("source_dataset") in _COMPARES_BOARDS:  # the row's JSON has turned the tuples into lists
            metadata = metadata | {"output": tuple(map(tuple, metadata["output"]))}
        entry["metadata"] = metadata
        score = float(dataset.score_answer(item.answer.strip(), entry))
    except MemoryError:
        raise  # the reward process reached its limit
    except Exception:
        log.debug("%s cannot read the answer %r", item.data_source, item.answer, exc_info=True)
        return Score(0.0, {"unreadable": 1.0})
    return Score(score, {"unreadable": 0.0})


def gym_dataset(data_source: str, settings: dict[str, Any]) -> Any:
    """Return reasoning-gym's dataset for `reasoning_gym/<task>`, created once per task and settings."""
    key = f"{data_source} {settings!r}"
    if key not in _gym_datasets:
        from reasoning_gym import create_dataset

        _gym_datasets[key] = create_dataset(data_source.removeprefix(GYM_PREFIX), seed=0, size=1, **settings)
    return _gym_datasets[key]


def only_compares(data_source: str, settings: dict[str, Any]) -> bool:
    """Return whether the task only compares the answer's text or number with the reference.

    Every other task needs a process that can be killed. With "9**9**9**9", tasks that call eval() never return, and
    with "R99999999999" a task uses all memory. `rush_hour` moves a car as far as the answer says, step by step.
    `propositional_logic` tries all values of the answer's variables.
    """
    from reasoning_gym.dataset import ProceduralDataset

    task = type(gym_dataset(data_source, settings))
    inherits = task.score_answer is ProceduralDataset.score_answer
    return inherits or data_source.removeprefix(GYM_PREFIX) in _COMPARES_DECIMALS


def answer_reader(config: RewardConfig) -> Reader | None:
    """Return the reader of the first of `reward.functions`; None if the trainer cannot read this function's answers.

    The trainer cannot know how a user's function reads an answer. For a reward model or code_tests, no answer exists.
    """
    first = config.functions[0] if config.functions else None
    if first in ("exact_match", "math_verify"):
        return final_answer
    return str.strip if first == "reasoning_gym" else None
