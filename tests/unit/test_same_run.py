"""The run in a directory is compared with the requested run before ranks start."""

import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import reduce

import pytest

from rlhf.checkpoint.commit.manifest import read_manifest, write_manifest
from rlhf.checkpoint.commit.user_files import user_files
from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.errors import EXIT_USER_ERROR, UserError
from rlhf.storage.layout import scan, step_dir, step_of
from tests.support.checkpoints import (
    IDENTITY,
    TINY_POLICY,
    PlainRole,
    flip_bit,
    make_checkpointer,
    make_config,
    resume,
    save_steps,
)
from tests.support.refusals import facts, says, user_error
from tests.support.sections import finished_step, prepare


@pytest.fixture
def config(tmp_path) -> Config:
    return make_config(tmp_path)


def steps(config: Config) -> list[int | None]:
    return [step_of(path) for path in scan(config.run_dir)]


def config_error(config: Config) -> str:
    return user_error(prepare, config)


def test_a_run_directory_rejects_changed_settings_before_and_after_the_end(config):
    """Earlier, a finished run answered any command: algorithm=rloo with another rate got GRPO's result and code 0."""
    for step in (8, 10):
        save_steps(config, PlainRole(), step)
        config.actor.optim.lr, config.trainer.seed = 5e-5, 2
        message = config_error(config)
        says(message, "actor.optim.lr", "1e-06 in the checkpoint", "5e-05 now")
        says(message, "trainer.seed", "1 in the checkpoint", "2 now")
        assert "trainer.experiment_name=NAME" in message
        assert "trainer.overwrite=true" in message
        assert ("finished at step 10" in message) == (step == 10)
        config.actor.optim.lr, config.trainer.seed = 1e-6, 1
        prepare(config)
    assert finished_step(config) == 10


def test_an_allowed_change_needs_steps_left_to_train(config):
    save_steps(config, PlainRole(), 8, 10)
    config.actor.optim.lr, config.trainer.allow_config_change = 5e-5, True
    says(config_error(config), "finished at step 10", "trainer.total_training_steps")
    config.trainer.total_training_steps = 20
    prepare(config)
    assert finished_step(config) is None
    shutil.rmtree(step_dir(config.run_dir, 10))
    config.trainer.total_training_steps = 10
    prepare(config)
    assert finished_step(config) is None


def test_checkpoints_of_another_version_are_left_as_they_are(config):
    """Earlier, such checkpoints were set aside as damaged, one after the other."""
    save_steps(config, PlainRole(), 8, 10)
    for step in (8, 10):
        folder = step_dir(config.run_dir, step)
        manifest = read_manifest(folder)
        (folder / "manifest.json").unlink()
        write_manifest(folder, replace(manifest, format=1))
    message = config_error(config)
    assert "has format 1" in message
    assert "use the version that saved it" in message
    assert "trainer.overwrite=true" in message
    assert sorted(steps(config)) == [8, 10]


def test_a_checkpoint_of_another_version_behind_a_damaged_one_is_left_as_it_is(config):
    """The ranks find the damage, and only then the checkpoint of another version behind it."""
    # Promise 10.
    save_steps(config, PlainRole(), 8, 10)
    folder = step_dir(config.run_dir, 8)
    manifest = read_manifest(folder)
    (folder / "manifest.json").unlink()
    write_manifest(folder, replace(manifest, format=1))
    flip_bit(step_dir(config.run_dir, 10) / "actor/model/rank_00000.safetensors", 8000)
    with pytest.raises(UserError, match="use the version that saved it"):
        resume(config, PlainRole())
    assert steps(config) == [8]


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_longer_run_continues_and_a_shorter_run_is_an_error(config, schedule):
    config.actor.optim.lr_scheduler_type = schedule
    save_steps(config, PlainRole(), 10)
    config.trainer.total_training_steps = 4
    says(config_error(config), "trainer.total_training_steps=4", str(config.run_dir), "10")
    config.trainer.total_training_steps, config.trainer.total_epochs = None, 1
    says(config_error(config), "trainer.total_epochs=1", "5 steps")
    config.trainer.total_training_steps, config.trainer.total_epochs = 11, 1
    if schedule != "constant":
        says(config_error(config), "trainer.total_training_steps", "10 in the checkpoint", "11 now")
        config.trainer.allow_config_change = True
    prepare(config)
    assert finished_step(config) is None


def test_harmless_differences_from_a_finished_run_are_logged(config, caplog):
    save_steps(config, PlainRole(), 10)
    config.rollout.val_kwargs.n = 3
    prepare(config)
    with caplog.at_level(logging.INFO, logger="rlhf"):
        assert finished_step(config) == 10
    says(caplog.text, "rollout.val_kwargs.n", "1 in the checkpoint", "3 now")


def test_a_finished_run_accepts_a_moved_model_but_not_another_model(config, tmp_path):
    save_steps(config, PlainRole(), 10)
    moved = tmp_path / "moved"
    shutil.copytree(TINY_POLICY, moved)
    config.model.path = str(moved)
    prepare(config)
    assert finished_step(config) == 10
    (moved / "generation_config.json").write_text("{}")
    with pytest.raises(UserError, match=facts("finished at step 10", f"model.path={moved}", "other files")):
        finished_step(config)
    config.model.path = "org/another"
    with pytest.raises(UserError, match=facts("model.path=org/another", "other files")):
        finished_step(config)


REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


def save_finished(config: Config) -> None:
    files = IDENTITY.fingerprints | user_files(config.reward, config.algorithm, config.actor, config.model, config.env)
    assert make_checkpointer(config, PlainRole(), 10, None, files).save(10) is not None


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("reward.functions", "own.py"),
        ("env.classes", "own.py"),
        ("env.command", "own.py"),
        ("env.template", "own.jinja"),
        ("model.chat_template", "own.jinja"),
        ("algorithm.adv_estimator", "own.py"),
        ("actor.policy_loss.loss_mode", "own.py"),
    ],
)
def test_a_finished_run_rejects_changed_files_of_functions_and_templates(config, tmp_path, caplog, setting, name):
    """The same command with another reward file once answered with the old report and code 0."""
    own = tmp_path / name
    own.write_text(REWARD)
    value = {"env.command": f"python {own}"}.get(setting, f"{own}:score" if name == "own.py" else str(own))
    *sections, key = setting.split(".")
    listed = setting in ("reward.functions", "env.classes")
    setattr(reduce(getattr, sections, config), key, [value] if listed else value)
    save_finished(config)
    prepare(config)
    assert finished_step(config) == 10
    own.write_text(REWARD.replace("1.0", "2.0"))
    message = user_error(finished_step, config)
    says(message, "finished at step 10", f"{setting}=", str(own), "other files", "estore the files")
    says(message, "trainer.experiment_name=NAME", "trainer.total_training_steps")
    config.trainer.allow_config_change = True
    with caplog.at_level(logging.INFO, logger="rlhf"):
        assert finished_step(config) == 10
    says(caplog.text, f"{setting}=", "other files")
    config.trainer.allow_config_change = False
    own.write_text(REWARD)
    assert finished_step(config) == 10
    own.write_text(REWARD.replace("1.0", "2.0"))
    config.trainer.allow_config_change, config.trainer.total_training_steps = True, 11
    prepare(config)
    assert finished_step(config) is None, "the ranks compare the files"


def test_a_finished_run_whose_reward_file_is_gone_has_its_report(config, tmp_path, caplog):
    own = tmp_path / "own.py"
    own.write_text(REWARD)
    config.reward.functions = ["exact_match", f"{own}:score"]
    save_finished(config)
    own.unlink()
    prepare(config)
    with caplog.at_level(logging.INFO, logger="rlhf"):
        assert finished_step(config) == 10
    says(caplog.text, "reward.functions=", str(own), "cannot be read")


def test_a_finished_run_of_a_release_without_hashes_of_functions_has_its_report(config, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(REWARD)
    config.reward.functions = [f"{own}:score"]
    save_steps(config, PlainRole(), 10)
    prepare(config)
    assert finished_step(config) == 10


def test_other_model_files_are_rejected_before_the_path_is_logged_as_harmless(config, tmp_path, caplog):
    save_steps(config, PlainRole(), 5)
    moved = tmp_path / "moved"
    shutil.copytree(TINY_POLICY, moved)
    config.model.path = str(moved)
    prepare(config)
    (moved / "generation_config.json").write_text("{}")
    caplog.set_level(logging.INFO, logger="rlhf")
    says(config_error(config), f"model.path={moved}", "other files", str(step_dir(config.run_dir, 5)))
    assert "does not affect the run's numbers" not in caplog.text
    config.trainer.allow_config_change = True
    prepare(config)


def test_allow_config_change_does_not_allow_another_base_for_adapters(config, tmp_path):
    config.model.lora.enabled = True
    save_steps(config, PlainRole(), 5)
    first, moved = config.model.path, tmp_path / "moved"
    shutil.copytree(TINY_POLICY, moved)
    config.model.path = str(moved)
    prepare(config)
    (moved / "generation_config.json").write_text("{}")
    saved = step_dir(config.run_dir, 5)
    for config.trainer.allow_config_change in (False, True):
        says(config_error(config), f"model.path={moved}", "adapters", str(saved), first)
    config.model.path = first
    with pytest.raises(UserError, match=facts("adapters", str(saved), "other files")):
        resume(config, PlainRole(), None, {"model.path": "of other files"})
    config.model.lora.enabled = False
    config.trainer.allow_config_change = True
    assert resume(config, PlainRole(), None, {"model.path": "of other files"}) == 5


def test_a_refused_fork_sets_nothing_aside(config, tmp_path):
    other = make_config(tmp_path / "other")
    save_steps(other, PlainRole(), 3)
    save_steps(config, PlainRole(), 2, 4)
    config.trainer.resume_mode = "resume_path"
    config.trainer.resume_from_path = str(step_dir(other.run_dir, 3))
    config.actor.optim.lr = 0.5
    message = config_error(config)
    says(message, "actor.optim.lr", "1e-06 in the checkpoint", "0.5 now", "trainer.allow_config_change=true")
    assert "experiment_name" not in message, "it has a directory of its own"
    assert "overwrite" not in message, "which is refused with resume_path"
    assert steps(config) == [4, 2]
    config.trainer.allow_config_change = True
    prepare(config)
    assert steps(config) == []


def test_a_fork_with_nothing_left_to_train_is_refused(config, tmp_path):
    """It once ended with "Done", 0 steps and no checkpoint."""
    other = make_config(tmp_path / "other")
    save_steps(other, PlainRole(), 10)
    config.trainer.resume_mode = "resume_path"
    config.trainer.resume_from_path = str(step_dir(other.run_dir, 10))
    for config.trainer.total_training_steps in (10, 4):
        says(config_error(config), "step 10", "nothing is left to train")
    config.trainer.total_training_steps = 11
    prepare(config)
    assert finished_step(config) is None


def test_a_checkpoint_that_cannot_be_read_is_passed_over(config):
    save_steps(config, PlainRole(), 2)
    config.actor.optim.lr = 0.5
    save_steps(config, PlainRole(), 4)
    config.actor.optim.lr = 0.25
    says(config_error(config), "actor.optim.lr", "0.5 in the checkpoint")
    flip_bit(step_dir(config.run_dir, 4) / "config.yaml", 99)
    says(config_error(config), "actor.optim.lr", "1e-06 in the checkpoint")


ANSWER = """
import sys
from rlhf.train import main
code = main(sys.argv[1:])
print(code, sorted({"torch", "transformers", "datasets", "reasoning_gym"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("algorithm=rloo", "actor.optim.lr=5e-5", "trainer.seed=2"),
            "algorithm.adv_estimator: grpo in the checkpoint, rloo now",
        ),
        (("trainer.resume_mode=disable",), "holds checkpoints up to step 80"),
    ],
)
def test_changed_settings_are_rejected_before_slow_imports_and_without_writes(tmp_path, settings, message):
    same = [f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu"]
    config = compose_config([*same, "checkpoint.async_save=false"], Library.find(None))
    save_steps(config, PlainRole(), 80)
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run([sys.executable, "-c", ANSWER, *same, *settings], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{EXIT_USER_ERROR} []\n", done.stderr
    assert message in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
