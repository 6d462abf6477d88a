"""A stored evaluation is shown again only for equal inputs: other adapters, judges or precisions are an error."""

import json
import shutil
from pathlib import Path

import pytest

from rlhf.config.library import Library
from rlhf.data import check_sources
from rlhf.evaluate.results import check_same, files_of, store_result, stored_result
from rlhf.evaluate.target_settings import PlannedEvaluation, plan
from rlhf.evaluate.targets import find_target
from rlhf.tracking import History
from tests.support.launching import TINY_POLICY
from tests.support.refusals import says, user_error

ADAPTED = ("reward=exact_match", "model.lora.enabled=true", "model.lora.path=other")
JUDGED = ("reward.functions=[reward_model]", "reward_model.path=other")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The working directory, with held-out prompts and the folder of an adapter or a reward model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": "1 + 1", "answer": "2"}))
    (tmp_path / "other").mkdir()
    shutil.copy(TINY_POLICY / "config.json", tmp_path / "other")
    (tmp_path / "other" / "weights.safetensors").write_text("first")
    return tmp_path


def planned(*settings: str, target: str = str(TINY_POLICY)) -> PlannedEvaluation:
    found = plan([find_target(target)], ["data.val_files=val.jsonl", *settings], Library.find(None))
    return found[0]


def evaluated(*settings: str, target: str = str(TINY_POLICY)) -> None:
    """Store a result as an evaluation does at its end."""
    each = planned(*settings, target=target)
    each.config.run_dir.mkdir(parents=True)
    History(each.config.run_dir / "metrics.jsonl").append({"step": 0, "val/accuracy": 0.5, "val/reward": 0.5})
    store_result(each, files_of(each))
    assert stored_result(planned(*settings, target=target)) is not None


@pytest.mark.parametrize(("settings", "name"), [(ADAPTED, "model.lora.path"), (JUDGED, "reward_model.path")])
def test_changed_files_in_a_folder_of_the_settings_are_an_error(folder, settings, name):
    evaluated(*settings)
    (folder / "other" / "weights.safetensors").write_text("second")
    says(user_error(stored_result, planned(*settings)), name, "other content", "trainer.overwrite=true")


@pytest.mark.parametrize("settings", [ADAPTED, JUDGED])
def test_a_stored_result_is_found_for_a_moved_folder_with_the_same_files(folder, settings):
    evaluated(*settings)
    (folder / "other").rename(folder / "moved")
    elsewhere = [setting.replace("=other", "=moved") for setting in settings]
    assert stored_result(planned(*elsewhere)) is not None, "the same files"
    (folder / "moved" / "weights.safetensors").write_text("second")
    assert user_error(stored_result, planned(*elsewhere))


def test_another_reward_model_on_the_hub_is_an_error():
    evaluated("reward.functions=[reward_model]", "reward_model.path=org/judge")
    for settings in (["reward_model.path=org/other"], ["reward_model.path=org/judge", "reward_model.revision=v2"]):
        error = user_error(stored_result, planned("reward.functions=[reward_model]", *settings))
        says(error, "reward_model.path")


def test_another_revision_of_a_hub_model_is_an_error():
    evaluated("reward=exact_match", target="org/model")
    error = user_error(stored_result, planned("reward=exact_match", "model.revision=v2", target="org/model"))
    says(error, "model.revision", "trainer.experiment_name")


def test_another_precision_is_an_error():
    evaluated("reward=exact_match", "backend.autocast=none")
    error = user_error(stored_result, planned("reward=exact_match", "backend.autocast=bfloat16"))
    says(error, "backend.autocast", "none", "bfloat16")


def test_other_settings_of_episodes(folder):
    (folder / "game.py").write_text("class Game:\n    def step(self, action):\n        return None\n")
    settings = ("reward=exact_match", "env.classes=[game.py:Game]")
    evaluated(*settings, "env.max_turns=1")
    error = user_error(stored_result, planned(*settings, "env.max_turns=8"))
    says(error, "env.max_turns", "1 before", "8 now")
    assert stored_result(planned(*settings, "env.max_turns=1", "env.num_workers=2")) is not None, "the same answers"


def test_a_file_that_changes_during_a_command_gives_no_result(folder):
    each = planned()
    before = files_of(each)
    check_same(each, before, files_of(each))
    (folder / "val.jsonl").write_text(json.dumps({"prompt": "1 + 2", "answer": "3"}))
    says(user_error(check_same, each, before, files_of(each)), "data.val_files", "changed during the command")


def test_an_evaluation_calls_no_callback_of_its_run(folder):
    assert planned("trainer.callbacks=[gone.py:f]", "trainer.callback_kwargs.a=1").config.trainer.callbacks == []


def test_a_converter_of_rows_may_make_only_the_held_out_prompts(folder):
    (folder / "rows.py").write_text("def f(row):\n    return row\n")
    config = planned("data.custom_cls.path=rows.py", "data.custom_cls.name=f").config
    assert config.data.custom_cls.spec == "rows.py:f"
    assert check_sources(config.data, config.reward, 1) is None


def test_a_file_that_is_gone_is_named():
    each = planned("reward.functions=[gone.py:f]")
    says(user_error(files_of, each), str(TINY_POLICY), "gone.py cannot be read", "Restore the file")
