"""Reward settings that are rejected before anything runs, and the messages."""

import pytest

from rlhf.config import RewardConfig, RewardModelConfig
from rlhf.errors import UserError
from rlhf.reward import check_reward


@pytest.fixture
def file(tmp_path):
    names = ("score", "other", "exact_match", "overlong")
    path = tmp_path / "rewards.py"
    path.write_text("".join(f"def {name}(**kwargs):\n    return 1\n" for name in names))
    return path


def check(file, *functions: str, model: str | None = None, **settings) -> None:
    full = [function.replace("FILE", str(file)) for function in functions]
    check_reward(RewardConfig(functions=full, **settings), RewardModelConfig(path=model))


def test_valid_reward_settings_are_accepted(file):
    check(file, "reasoning_gym")
    check(file, "math_verify", "exact_match", "FILE:score", "FILE:other", weights=[1.0, 0.0, -0.5, 2.0])
    check(file, "reward_model", "FILE:score", model="org/name")


@pytest.mark.parametrize(
    ("functions", "settings", "message"),
    [
        (
            [],
            {},
            "name at least one of reasoning_gym, math_verify, exact_match, code_tests, reward_model or path",
        ),
        (["mathverify"], {}, "'mathverify' is none of .* Did you mean math_verify?"),
        (["exact_match", "reward_mode"], {}, "'reward_mode' is none of .* Did you mean reward_model?"),
        (["rewards.score"], {}, r"'rewards\.score' is none of .* Did you mean rewards\.py:score\?"),
        (["./rewards:score"], {}, r"\./rewards:score .* Did you mean \./rewards\.py:score\?"),
        (["xyz"], {}, r"not of the form path/to/file\.py:name\.$"),
        (["rewards.py"], {}, r"rewards\.py is not of the form"),
        (["exact_match", "FILE:scor"], {}, "defines no 'scor'. Did you mean score?"),
        (["FILE:score", "exact_match", "FILE:score"], {}, "two entries would both log reward/score"),
        (["exact_match", "FILE:exact_match"], {}, "two entries would both log reward/exact_match"),
        (["FILE:overlong"], {}, "reward/overlong is reserved"),
        (["reward_model"], {}, r"reward_model needs reward_model\.path"),
        (
            ["exact_match"],
            {"weights": [1.0, 2.0]},
            r"reward\.weights=\[1\.0, 2\.0\]: 2 for 1 functions \(exact_match\)",
        ),
        (["exact_match", "FILE:score"], {"weights": []}, r"reward\.weights=\[\]: 0 for 2 functions"),
        (["exact_match"], {"weights": [float("nan")]}, "must be finite numbers"),
        (["exact_match", "FILE:score"], {"weights": [1.0, float("inf")]}, "must be finite numbers"),
        (["exact_match", "FILE:score"], {"weights": [0.0, 0.0]}, "every reward would be 0"),
    ],
)
def test_invalid_reward_settings_are_rejected(file, functions, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        check(file, *functions, **settings)
    assert str(caught.value).startswith("reward.weights" if "weights" in settings else "reward.functions")
