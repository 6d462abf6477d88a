"""Validation metrics of each source and variable, compared with the mean of all draws and with values by hand."""

import random
from collections import Counter
from itertools import combinations, product
from statistics import fmean, pstdev

import pytest

from rlhf.config import RewardConfig
from rlhf.experience.validation_metrics import DRAWS, AnsweredPrompt, is_right, pass_at_k, validation_metrics
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardResult, answer_reader

SINGLE_PROCESS = Coordinator(GlooTransport())


def answered(scores: list[float], answers: list[str | None] | None = None, source: str = "sums") -> AnsweredPrompt:
    results = [RewardResult(score, {"exact_match": score}) for score in scores]
    return AnsweredPrompt(source, results, answers or [None] * len(scores))


@pytest.mark.parametrize(("n", "correct"), [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(n, correct):
    right = [1] * correct + [0] * (n - correct)
    for k in range(1, n + 1):
        assert pass_at_k(n, correct, k) == pytest.approx(fmean(max(chosen) for chosen in combinations(right, k)))


def test_names_of_one_response_and_of_several():
    assert validation_metrics([answered([1.0])], 1, SINGLE_PROCESS) == {
        "val-core/sums/acc/mean@1": 1,
        "val-aux/sums/reward/mean@1": 1,
        "val-aux/sums/reward/exact_match/mean@1": 1,
    }
    several = validation_metrics([answered([1.0, 0.0, 0.0, 1.0, 0.0], ["a", "b", "b", "a", "b"])], 5, SINGLE_PROCESS)
    assert {name for name in several if name.startswith("val-core")} == {
        f"val-core/sums/acc/{metric}" for metric in ("mean@5", "pass@5", "best@5/mean", "maj@5/mean")
    }
    assert {name.rpartition("/acc/")[2] for name in several if name.startswith("val-aux/sums/acc/")} == {
        "std@5", "worst@5/mean",
        *(f"{metric}@{k}{end}" for k in (2, 4) for metric, end in
          (("pass", ""), ("best", "/mean"), ("worst", "/mean"), ("maj", "/mean"))),
    }  # fmt: skip


def test_draws_come_near_the_mean_of_every_draw():
    rng = random.Random(3)
    for _ in range(5):
        scores = [rng.choice([0.0, 0.0, 0.5, 1.0]) for _ in range(4)]
        answers = [rng.choice("abc") for _ in range(4)]
        found = validation_metrics([answered(scores, answers)], 4, SINGLE_PROCESS)
        for k in (2, 4):
            draws = list(product(range(4), repeat=k))
            # The most frequent answer (of several, the first), and the first response with it.
            voted = [Counter(answers[i] for i in draw).most_common(1)[0][0] for draw in draws]
            values = {
                f"best@{k}/mean": [max(scores[i] for i in draw) for draw in draws],
                f"worst@{k}/mean": [min(scores[i] for i in draw) for draw in draws],
                f"maj@{k}/mean": [
                    scores[next(i for i in draw if answers[i] == vote)] for draw, vote in zip(draws, voted, strict=True)
                ],
            }
            at_k = {metric: value for name, value in found.items() if "/reward/" in name and "exact" not in name
                    for metric in [name.rpartition("reward/")[2]] if f"@{k}/" in metric}  # fmt: skip
            assert at_k.keys() == values.keys()
            for metric, of_draws in values.items():
                # The draws have a fixed seed; their mean has the standard deviation of a draw over sqrt(DRAWS).
                five_sigma = 5 * pstdev(of_draws) / DRAWS**0.5
                assert at_k[metric] == pytest.approx(fmean(of_draws), rel=1e-12, abs=five_sigma)


def test_sources_and_variables_are_apart_and_reward_is_the_main_one_where_scores_are_no_accuracy():
    half = RewardResult(0.7, {"style": 0.5, "length": 0.2}, {"words": 7.0})
    none = RewardResult(0.0, {"style": 0.0, "length": 0.0}, {"words": 3.0})
    odd = RewardResult(2.0, {"style": 1.0, "length": 1.0})  # without the value `words`
    prompts = [
        AnsweredPrompt("a/b", [half, none], [None, None]),
        AnsweredPrompt("a/b", [none, none], [None, None]),
        AnsweredPrompt("c", [odd, odd], [None, None]),
    ]
    found = validation_metrics(prompts, 2, SINGLE_PROCESS)
    assert found["val-core/a/b/reward/mean@2"] == pytest.approx(0.175)
    assert found["val-aux/a/b/reward/style/mean@2"] == pytest.approx(0.125)
    assert found["val-aux/a/b/words/mean@2"] == pytest.approx(4)
    assert found["val-core/c/acc/mean@2"] == 1
    assert not any("a/b/acc" in name or "c/words" in name or "maj" in name for name in found)


def test_a_function_may_say_itself_what_is_right():
    results = [RewardResult(-1.0, {"dapo": -1.0}, {"acc": 0.0}), RewardResult(1.0, {"dapo": 1.0}, {"acc": 1.0})]
    found = validation_metrics([AnsweredPrompt("maths", results, [None, None])], 2, SINGLE_PROCESS)
    assert found["val-core/maths/acc/mean@2"] == 0.5
    assert found["val-core/maths/acc/pass@2"] == 1
    assert found["val-aux/maths/reward/mean@2"] == 0


@pytest.mark.parametrize(
    ("function", "answer"),
    [("exact_match", "42"), ("math_verify", "42"), ("reasoning_gym", r"so \boxed{42}"), ("reward_model", None)],
)
def test_answers_are_those_that_the_verifier_reads(function, answer):
    reader = answer_reader(RewardConfig(functions=[function]))
    assert (reader and reader(" so \\boxed{42} ")) == answer


def test_what_only_some_responses_have_is_no_variable_of_their_prompt():
    results = [RewardResult(1.0, {"style": 1.0, "length": 0.0}), RewardResult(1.0, {"style": 1.0})]
    found = validation_metrics([AnsweredPrompt("a", results, [None, None])], 2, SINGLE_PROCESS)
    assert "val-aux/a/reward/style/mean@2" in found
    assert not any("length" in name for name in found)


@pytest.mark.parametrize(("acc", "score", "right"), [(0.5, 1.0, False), (1.0, -1.0, True), (None, 1.0, True)])
def test_a_response_is_right_as_the_function_says(acc, score, right):
    """If the function returns `acc`, it decides, even if it is a fraction of passed tests."""
    assert is_right(RewardResult(score, {"f": score}, {} if acc is None else {"acc": acc})) is right
