"""Several reward functions in real processes: weights, order, and every failure under every `reward.on_error`."""

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf.config import RewardConfig
from rlhf.errors import UserError
from rlhf.reward import RewardError, RewardItem, RewardResult, Score, build_reward

REWARDS = """
import os
import time

def length(solution_str, **kwargs):
    return len(solution_str)

def digits(solution_str, **kwargs):
    count = sum(c.isdigit() for c in solution_str)
    return {"score": count / max(1, len(solution_str)), "digit_count": count}

def moody(solution_str, **kwargs):
    if solution_str == "raise":
        raise ValueError("a needle of a traceback")
    if solution_str == "exit":
        raise SystemExit
    if solution_str == "die":
        os._exit(3)
    if solution_str == "killed":
        os.kill(os.getpid(), 9)
    if solution_str == "hang":
        time.sleep(60)
    return {"nan": float("nan"), "none": None, "dict": {"digit_count": 1}}.get(solution_str, 0.5)

def taken(**kwargs):
    return {"score": 1, "overlong": 2}

def same_number(**kwargs):
    return {"score": 1, "digit_count": 2}

def name_of_another(**kwargs):
    return {"score": 1, "length": 2}

def signals(extra_info, **kwargs):
    open(extra_info["flag"], "w").close()
    return 1

made_later = [1].append
narrow = lambda solution: 1

if os.path.exists(__file__ + ".die"):
    os._exit(4)
"""


class Model:
    """Stands in for a reward model: its score is the number in the prompt's chat."""

    def __init__(self, waits_for: Path | None = None):
        self.waits_for = waits_for
        self.called_in: list[threading.Thread] = []
        self.closed = False

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        self.called_in.append(threading.current_thread())
        deadline = time.monotonic() + 120
        while self.waits_for and not self.waits_for.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not self.waits_for or self.waits_for.exists(), "the functions must work meanwhile"
        return [Score(float(item.messages[0]["content"])) for item in items]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


@pytest.fixture
def reward_of(folder):
    made = []

    def make(*functions: str, model=None, **settings):
        settings = {"num_workers": 1} | settings
        full = [f.replace("FILE", f"{folder}/rewards.py") for f in functions]
        made.append(build_reward(RewardConfig(functions=full, **settings), model))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def items(*responses: str, truth: str = "42", chat: str = "0.25") -> list[RewardItem]:
    return [RewardItem("src", response, truth, {}, [{"role": "user", "content": chat}]) for response in responses]


def test_the_reward_is_the_weighted_sum_and_each_score_is_kept(reward_of):
    reward = reward_of("exact_match", "FILE:length", "FILE:digits", weights=[1.0, -0.5, 2.0])
    right, wrong = reward.score(items("42", "4x"))
    assert right == RewardResult(2.0, {"exact_match": 1.0, "length": 2.0, "digits": 1.0}, {"digit_count": 2.0})
    assert wrong == RewardResult(0.0, {"exact_match": 0.0, "length": 2.0, "digits": 0.5}, {"digit_count": 1.0})
    assert reward.score([]) == []


def test_without_weights_all_weigh_the_same(reward_of):
    assert reward_of("FILE:length", "exact_match").score(items("42"))[0].score == 3.0


def test_the_first_function_decides_what_is_correct(reward_of):
    first, second = ["exact_match", "FILE:length"], ["FILE:length", "exact_match"]
    assert [r.correct for r in reward_of(*first, weights=[0.0, 1.0]).score(items("42", "7"))] == [True, False]
    results = reward_of(*second, weights=[0.0, 1.0]).score(items("42", ""))
    assert [r.correct for r in results] == [True, False]
    assert list(results[0].terms) == ["length", "exact_match"]


def test_results_keep_the_order_of_samples_with_slow_functions(reward_of):
    reward = reward_of("FILE:moody", "FILE:length", "math_verify", timeout_s=2.0, num_workers=2)
    responses = ["42", "hang", *(["7" * n for n in range(1, 6)]), "hang", "42"]
    results = reward.score(items(*responses))
    assert [r.terms["length"] for r in results] == [len(response) for response in responses]
    assert [r.terms["math_verify"] for r in results] == [float(response == "42") for response in responses]
    assert [r.timeouts for r in results] == [int(response == "hang") for response in responses]


def test_functions_work_while_the_model_computes(reward_of, tmp_path):
    model = Model(waits_for=tmp_path / "flag")
    settings = {"weights": [1.0, 4.0, 1.0], "writable": [str(tmp_path)]}
    reward = reward_of("FILE:signals", "reward_model", "exact_match", model=model, **settings)
    item = dataclasses.replace(items("42")[0], extra_info={"flag": str(model.waits_for)})
    (result,) = reward.score([item])
    assert list(result.terms.items()) == [("signals", 1.0), ("reward_model", 0.25), ("exact_match", 1.0)]
    assert result.score == 3.0
    assert reward.score([]) == []
    assert model.called_in == [threading.current_thread()] * 2, "collective: on the calling thread, also without items"
    reward.close()
    assert model.closed


@pytest.mark.parametrize("bad", ["raise", "exit", "die", "nan", "none", "dict"])
def test_a_failure_is_scored_and_counted_when_asked(reward_of, bad):
    reward = reward_of("exact_match", "FILE:moody", on_error="score", failed_score=-2.0, weights=[1.0, 10.0])
    results = reward.score(items("42", bad, bad, "7"))
    assert [r.score for r in results] == [6.0, -20.0, -20.0, 5.0]
    assert [r.terms["moody"] for r in results] == [0.5, -2.0, -2.0, 0.5]
    assert [(r.failures, r.timeouts) for r in results] == [(0, 0), (1, 0), (1, 0), (0, 0)]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ("raise", UserError, r"(?s)reward\.on_error=stop.*response='raise'.*a needle of a traceback"),
        ("exit", UserError, r"(?s)reward\.on_error=stop.*response='exit'.*SystemExit"),
        ("die", UserError, r"(?s)moody: .*died twice \(exit status 3\).*response='die'"),
        ("killed", RewardError, r"(?s)moody: .*died twice \(signal 9\).*response='killed'"),
        ("nan", UserError, r"(?s)moody returned nan.*response='nan'"),
        ("none", UserError, "moody returned None"),
        ("dict", UserError, "moody returned a dict without 'score'"),
    ],
)
def test_a_failure_ends_the_run_by_default(reward_of, bad, error, message):
    reward = reward_of("exact_match", "FILE:moody")
    with pytest.raises(error, match=message):
        reward.score(items("42", bad))
    assert reward.score(items("42"))[0].score == 1.5, "the processes must live on"


@pytest.mark.parametrize("on_error", ["stop", "score"])
def test_a_timeout_is_scored_whatever_the_policy(reward_of, on_error):
    reward = reward_of("FILE:length", "FILE:moody", on_error=on_error, failed_score=-2.0, timeout_s=2.0)
    (result,) = reward.score(items("hang"))
    assert result == RewardResult(2.0, {"length": 4.0, "moody": -2.0}, timeouts=1)


def test_timeouts_are_reported_together_with_their_count_and_one_sample(reward_of, folder, caplog):
    reward = reward_of("FILE:length", "FILE:moody", failed_score=-2.0, timeout_s=2.0)
    reward.score(items("hang", "fine", "hang"))
    (timeouts,) = reward.pop_timeouts()
    assert timeouts.function == f"{folder}/rewards.py:moody"
    assert "took longer than reward.timeout_s=2 on 2 samples, which score -2. The first: " in str(timeouts)
    assert str(timeouts).count("response='hang'") == 1
    assert reward.pop_timeouts() == caplog.messages == []


def test_two_functions_may_fail_on_one_sample(reward_of, folder):
    (folder / "more.py").write_text("def other(**kwargs):\n    raise KeyError\n")
    reward = reward_of("FILE:moody", f"{folder}/more.py:other", on_error="score", failed_score=-1.0)
    assert [(r.score, r.failures) for r in reward.score(items("raise", "fine"))] == [(-2.0, 2), (-0.5, 1)]


def test_failures_are_logged_once_per_function_with_the_traceback(reward_of, folder, caplog):
    (folder / "more.py").write_text("def other(**kwargs):\n    raise KeyError('of the other')\n")
    reward = reward_of("FILE:moody", f"{folder}/more.py:other", on_error="score", num_workers=3)
    with caplog.at_level(logging.WARNING, "rlhf"):
        for _ in range(2):
            assert sum(r.failures for r in reward.score(items(*["raise"] * 9))) == 18
    first, second = sorted(caplog.messages)
    assert "more.py:other failed" in first
    assert "KeyError: 'of the other'" in first
    assert "rewards.py:moody failed" in second
    assert "a needle of a traceback" in second
    assert "response='raise'" in second


@pytest.mark.parametrize(
    ("bad", "meaning"),
    [
        ("taken", "overlong is already a metric of every run"),
        ("same_number", "digit_count is already a value that digits returns"),
        ("name_of_another", "length is already the score of length"),
    ],
)
def test_numbers_with_names_of_other_metrics_end_the_run_whatever_the_policy(reward_of, bad, meaning):
    reward = reward_of("FILE:length", "FILE:digits", f"FILE:{bad}", on_error="score")
    with pytest.raises(UserError, match=meaning):
        reward.score(items("x"))


@pytest.mark.parametrize("name", ["made_later", "narrow"])
def test_a_call_that_cannot_work_ends_the_run_whatever_the_policy(reward_of, name):
    reward = reward_of(f"FILE:{name}", on_error="score")
    with pytest.raises(UserError, match=rf"{name}: the function takes"):
        reward.score(items("x"))


def test_an_import_that_fails_ends_the_run_whatever_the_policy(reward_of, folder):
    (folder / "more.py").write_text("import no_such_module\ndef other(**kwargs):\n    return 1\n")
    reward = reward_of(f"{folder}/more.py:other", on_error="score")
    with pytest.raises(UserError, match="cannot be imported: ModuleNotFoundError"):
        reward.score(items("x"))
    (folder / "rewards.py.die").touch()
    with pytest.raises(RewardError, match=r"died while it started \(exit status 4\)"):
        reward_of("FILE:length", on_error="score").score(items("x"))


def test_a_reward_model_score_that_is_not_finite_follows_on_error(reward_of):
    model = Model()
    (result,) = reward_of("reward_model", "exact_match", model=model, on_error="score").score(items("42", chat="nan"))
    assert result == RewardResult(1.0, {"reward_model": 0.0, "exact_match": 1.0}, failures=1)
    with pytest.raises(UserError, match=r"reward_model returned the score inf for a sample: .*response='42'"):
        reward_of("reward_model", model=model).score(items("42", chat="inf"))
