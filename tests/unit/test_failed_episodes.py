"""Failed episodes: an evaluation counts them, and the prompts that it leaves out."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from rlhf.config import TrainerConfig
from rlhf.config.schema.env import EnvConfig
from rlhf.data import Prompt
from rlhf.errors import UserError
from rlhf.evaluate.results import table
from rlhf.experience.episode import Stage
from rlhf.experience.evaluation import Evaluator
from rlhf.models import tiny
from rlhf.reward import Reward
from rlhf.rollout import Sample, SamplingParams
from tests.support.refusals import says
from tests.support.thread_ranks import make_coordinator, messages, run_thread_ranks

FAILED = True


def episode(prompt: Prompt, number: int, failed: bool) -> Any:
    reason: Any = "failed" if failed else "stop"
    sample = Sample.of(prompt.index, number, [] if failed else [7], [] if failed else [-0.5], reason, 0)
    return SimpleNamespace(
        phase=Stage.FAILED if failed else Stage.DONE,
        failures=["it burnt"] * failed,
        prompt=prompt,
        prompt_ids=[] if failed else [3],
        rewards=[float(number)],
        kind=SimpleNamespace(definition=SimpleNamespace(label="shop")),
        conversation=[],
        finished=lambda version: sample,
    )


def evaluation(rank: int, ranks: Sequence[Sequence[tuple[bool, ...]]]) -> tuple[Any, list[str]]:
    """Return this rank's metrics or error, and its warnings.

    `ranks` says of each rank's prompts which episodes failed.
    """
    coordinator, warnings = make_coordinator(), messages(logging.WARNING)
    rows = ranks[rank]
    prompts = [Prompt(i, [{"role": "user", "content": "Go."}], [3], "games", None, {}) for i in range(len(rows))]
    played = [
        [episode(prompt, number, failed) for number, failed in enumerate(row)]
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    sampler: Any = SimpleNamespace(sleep=lambda: None)
    episodes: Any = SimpleNamespace(config=EnvConfig(max_failed=0.5), play=lambda asked, **more: played)
    held_out: Any = prompts
    evaluator = Evaluator(
        held_out,
        sampler,
        SamplingParams(max_tokens=8),
        2,
        Reward([]),
        None,
        AutoTokenizer.from_pretrained(tiny.FOLDER),
        coordinator,
        TrainerConfig(),
        lambda samples: None,
        episodes,
    )
    try:
        return evaluator.evaluate(4), warnings
    except UserError as error:
        return str(error), warnings


def test_an_evaluation_says_how_many_prompts_it_leaves_out():
    """A reader compared means over the easy prompts of one step with means over all prompts of another."""
    whole, half = (False, False), (False, FAILED)
    found = run_thread_ranks(2, evaluation, [[half, whole, half], [whole]])
    for metrics, _ in found:
        assert metrics["val/env_failed"] == 2 / 8
        assert metrics["val/reward"] == 0.5
    [[warning], none] = [warnings for _, warnings in found]
    says(warning, "step 4", "2 of 4 prompts", "val/env_failed")
    assert none == []


def test_without_failures_an_evaluation_warns_of_nothing():
    [(metrics, warnings)] = run_thread_ranks(1, evaluation, [[(False, False)]])
    assert (metrics["val/env_failed"], warnings) == (0, [])


def test_an_evaluation_without_whole_prompts_ends_no_training():
    half = (False, FAILED)
    results = run_thread_ranks(2, evaluation, [[half], [half, half]])
    assert [metrics["val/env_failed"] for metrics, _ in results] == [0.5, 0.5]
    assert not any("val/accuracy" in metrics for metrics, _ in results)
    says("".join(results[0][1]), "left out 3 of 3 prompts", "it burnt")


def test_the_table_of_results_shows_missing_metrics():
    """A stored result without accuracy ended each repetition of the command with a KeyError."""
    metrics = {"val/accuracy": 0.25, "val/reward": 1.5}
    rows = table([{"target": "old", "step": 1, "metrics": {}}, {"target": "new", "step": 2, "metrics": metrics}])
    lines = [line.split() for line in rows.splitlines()]
    assert ["old", "1", "-", "-"] in lines
    assert ["new", "2", "25.0%", "1.500"] in lines
