"""Validation metrics of verl's names have verl's own numbers, to the last digits."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlhf.experience.validation_metrics import AnsweredPrompt, validation_metrics
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardResult
from tests.support.peers import run_in_peers

pytestmark = pytest.mark.peers
SCRIPT = Path(__file__).parents[1] / "support" / "verl_validation.py"


def evaluation(n: int) -> tuple[list[AnsweredPrompt], dict[str, Any]]:
    """Return six prompts of two sources with `n` responses each, in our form and in verl's."""
    rng, prompts = random.Random(n), []
    sources, uids, numbers = [], [], {"reward": [], "acc": [], "pred": []}
    for number in range(6):
        source = ["openai/gsm8k", "maths"][number % 2]
        scores, answers = [rng.choice([0.0, 1.0]) for _ in range(n)], [rng.choice("abcd") for _ in range(n)]
        results = [RewardResult(score / 2, {"function": score}) for score in scores]
        prompts.append(AnsweredPrompt(source, results, answers))
        sources += [source] * n
        uids += [str(number)] * n
        for name, values in (("reward", [score / 2 for score in scores]), ("acc", scores), ("pred", answers)):
            numbers[name] += values
    return prompts, {"data_sources": sources, "sample_uids": uids, "infos_dict": numbers}


def test_validation_metrics_with_verls_names_equal_verls(tmp_path):
    cases = {n: evaluation(n) for n in (1, 2, 5, 8)}
    (tmp_path / "cases").write_text(json.dumps([case for _, case in cases.values()]))
    every = json.loads(run_in_peers(SCRIPT, tmp_path / "cases").splitlines()[-1])
    for (n, (prompts, _)), theirs in zip(cases.items(), every, strict=True):
        expected = {
            f"{source}/{variable}/{metric}": value
            for source, variables in theirs.items()
            for variable, metrics in variables.items()
            for metric, value in metrics.items()
            if not metric.endswith("/std")
        }
        metrics = validation_metrics(prompts, n, Coordinator(GlooTransport()))
        # verl has neither pass@k nor metrics of single reward functions.
        ours = {name.partition("/")[2]: value for name, value in metrics.items() if "/pass@" not in name}
        ours = {name: value for name, value in ours.items() if "/reward/function/" not in name}
        assert ours == pytest.approx(expected, rel=1e-12)
