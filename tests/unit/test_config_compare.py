import logging
from dataclasses import replace

import pytest
import yaml

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.commit.user_files import user_files
from rlhf.checkpoint.load.stored_config import changes_since
from rlhf.config import Config
from rlhf.config.compare import Change, ResolvedConfig, compare, compare_text, log_changes, reject_changes
from rlhf.config.resolved import to_yaml
from rlhf.config.same_files import same_value
from rlhf.errors import UserError
from tests.support.published import publish


def test_equal_configurations_have_no_difference():
    diff = compare(Config(), Config())
    assert diff.harmless == []
    assert diff.trajectory == []


def test_differences_are_sorted_by_their_meaning():
    stored, present = Config(), Config()
    present.trainer.nproc = 2
    present.rollout.val_kwargs.n = 4
    present.actor.optim.lr = 0.5
    present.data.reasoning_gym.config = {"min_terms": 3}
    diff = compare(stored, present)
    assert diff.harmless == [Change("trainer.nproc", 1, 2), Change("rollout.val_kwargs.n", 1, 4)]
    assert diff.trajectory == [
        Change("data.reasoning_gym.config", {}, {"min_terms": 3}),
        Change("actor.optim.lr", 1e-6, 0.5),
    ]


def test_dp_replicate_null_equals_the_stored_number_of_replicas():
    stored, present = Config(), Config()
    stored.backend.dp_replicate = 2
    assert compare(stored, present).harmless == []
    present.backend.dp_replicate = 4
    assert compare(stored, present).harmless == [Change("backend.dp_replicate", 2, 4)]


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("key", ["total_training_steps", "total_epochs"])
def test_a_new_run_length_changes_the_run_only_with_a_decaying_schedule(schedule, key, role):
    stored, present = Config(), Config()
    for config in (stored, present):
        getattr(config, role).optim.lr_scheduler_type = schedule
    setattr(present.trainer, key, 7)
    diff = compare(stored, present)
    assert [c.key for c in diff.harmless] == ([f"trainer.{key}"] if schedule == "constant" else [])
    assert [c.key for c in diff.trajectory] == ([] if schedule == "constant" else [f"trainer.{key}"])


def test_settings_of_a_critic_matter_only_where_there_is_one():
    for estimator in ("grpo", "gae"):
        stored, present = Config(), Config()
        stored.algorithm.adv_estimator = present.algorithm.adv_estimator = estimator
        present.critic.grad_clip = 0.5
        diff = compare(stored, present)
        assert [c.key for c in (diff.trajectory if estimator == "gae" else diff.harmless)] == ["critic.grad_clip"]
        assert len(diff.trajectory + diff.harmless) == 1


def test_the_error_about_changes_shows_both_values_and_all_remedies():
    stored, present = Config(), Config()
    present.actor.optim.lr, present.rollout.n = 0.5, 4
    with pytest.raises(UserError) as caught:
        reject_changes(compare(stored, present), allow=False)
    message = str(caught.value)
    assert "actor.optim.lr: 1e-06 in the checkpoint, 0.5 now" in message
    assert "rollout.n: 8 in the checkpoint, 4 now" in message
    assert "Restore the checkpoint's values" in message
    for way in ("allow_config_change=true", "experiment_name=NAME", "default_local_dir=FOLDER", "overwrite=true"):
        assert f"trainer.{way}" in message


def test_allow_config_change_is_not_offered_for_a_changed_lora_rank():
    stored, present = Config(), Config()
    present.model.lora.rank, present.actor.optim.lr = 4, 0.5
    with pytest.raises(UserError) as caught:
        reject_changes(compare(stored, present), allow=False)
    message = str(caught.value)
    assert "model.lora.rank: 32 in the checkpoint, 4 now" in message
    assert message.endswith("The checkpoint lacks tensors for the new model.lora.rank.")
    assert "allow_config_change" not in message


def test_changes_that_are_allowed_are_logged(caplog):
    stored, present = Config(), Config()
    present.actor.optim.lr = 0.5
    diff = compare(stored, present)
    reject_changes(diff, allow=True)
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        log_changes(diff)
    assert "actor.optim.lr: 1e-06 in the checkpoint, 0.5 now" in caplog.text


def test_harmless_differences_are_logged(caplog):
    stored, present = Config(), Config()
    present.trainer.save_freq = 5
    with caplog.at_level(logging.INFO, logger="rlhf"):
        log_changes(compare(stored, present))
    assert "trainer.save_freq: 20 in the checkpoint, 5 now" in caplog.text


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Make a folder with a file and a link to it; it is the working folder and `~`."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "data" / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "spelled",
    ["./data/a.jsonl", "data/../data/a.jsonl", "~/data/a.jsonl", "link.jsonl", "{here}/data/a.jsonl", ["data/a.jsonl"]],
)
@pytest.mark.parametrize("key", ["data.train_files", "model.path", "model.chat_template"])
def test_the_same_file_spelled_otherwise_is_the_same(places, key, spelled):
    if isinstance(spelled, str):
        spelled = spelled.format(here=places)
    assert same_value(key, "data/a.jsonl", spelled)
    assert not same_value(key, "data/b.jsonl", spelled)
    assert not same_value("trainer.experiment_name", "data/a.jsonl", spelled)


def test_a_chat_template_is_compared_by_its_content(places):
    """The file may have moved, also to or from `~`; but a template with another text makes another run."""
    config = Config()
    config.model.path, config.model.chat_template = "m", "~/gone.jinja"
    (places / "gone.jinja").write_text("{{ messages }}")
    path = publish(places / "run", 2, config=to_yaml(config))
    manifest = replace(
        read_manifest(path),
        fingerprints=user_files(config.reward, config.algorithm, config.actor, config.model, config.env),
    )
    (places / "gone.jinja").rename(places / "moved.jinja")
    (places / "other.jinja").write_text("{{ messages }}!")
    for name, changed in (
        ("moved.jinja", []),
        ("other.jinja", ["model.chat_template"]),
        (None, ["model.chat_template"]),
    ):
        config.model.chat_template = name
        diff = changes_since(path, manifest, ResolvedConfig.of(config))
        assert [change.key for change in diff.trajectory] == changed


def test_functions_of_one_file_are_different_values(places):
    (places / "r.py").write_text("")
    (places / "l.py").symlink_to(places / "r.py")
    assert same_value("reward.functions", ["r.py:f", "exact_match"], ["./l.py:f", "exact_match"])
    assert not same_value("reward.functions", ["r.py:f"], ["r.py:g"])
    assert not same_value("reward.functions", ["r.py:f", "exact_match"], ["exact_match", "r.py:f"])


def test_a_relative_path_from_another_directory_matches_by_content(places, monkeypatch):
    (places / "elsewhere").mkdir()
    monkeypatch.chdir(places / "elsewhere")
    assert same_value("data.train_files", "data/a.jsonl", f"{places}/data/a.jsonl")
    assert not same_value("data.train_files", "other/a.jsonl", f"{places}/data/a.jsonl")
    assert not same_value("reward.functions", "data/a.jsonl", f"{places}/data/a.jsonl")


def test_a_respelled_path_is_no_change(places):
    stored, present = Config(), Config()
    stored.model.path, present.model.path = "data", str(places / "data")
    stored.data.train_files, present.data.train_files = "data/*.jsonl", ["./data/*.jsonl"]
    diff = compare(stored, present)
    assert (diff.harmless, diff.trajectory) == ([], [])


ENDLESS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A billion values in half a kilobyte."""


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "5\n", "[" * 2000, ENDLESS], ids=["list", "number", "deep", "endless"])
def test_a_stored_configuration_that_is_not_valid_is_a_yaml_error(text):
    with pytest.raises(yaml.YAMLError):
        compare_text(text, Config(), "0.1.0")
