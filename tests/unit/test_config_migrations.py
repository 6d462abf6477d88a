"""Stored configurations of older releases get the present names, and each changed setting needs a migration."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from rlhf.checkpoint.commit.manifest import read_manifest, write_manifest
from rlhf.checkpoint.verbs.runs import parse_rules
from rlhf.config import Config, migrations
from rlhf.config.compare import compare_text, reject_changes
from rlhf.config.known_settings import SETTINGS, setting_of
from rlhf.config.migrations import ANY, MIGRATIONS, Added, Removed, Renamed, migrate
from rlhf.config.overrides import stored_settings
from rlhf.config.resolved import from_stored, to_yaml
from rlhf.errors import UserError
from rlhf.storage.layout import MANIFEST
from tests.support.commands import compose
from tests.support.configurations import make
from tests.support.published import publish

# The present schema is the newest of three; 0.8.0 stored other names.
TABLE = {
    "0.9.0": (
        Renamed("actor.optim.learning_rate", "actor.lr"),
        Removed("old.speed", 3, "Leave it out: the speed is 3."),
        Removed("old.colour", ANY, "Leave it out."),
    ),
    "1.0.0": (Renamed("actor.lr", "actor.optim.lr"), Added("rollout.min_p", 0.25)),
}


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(migrations, "MIGRATIONS", TABLE)


def sections(text: str) -> dict[str, Any]:
    return yaml.safe_load(text)


def stored_by_0_8_0(config: Config, *, speed: int = 3) -> str:
    """Return the text that 0.8.0 stored for a run with the settings `config`."""
    tree = sections(to_yaml(config))
    tree["actor"]["optim"]["learning_rate"] = tree["actor"]["optim"].pop("lr")
    del tree["rollout"]["min_p"]
    tree["old"] = {"speed": speed, "colour": "red"}
    return yaml.safe_dump(tree)


def test_a_chain_of_changes_leads_to_the_present_names(table):
    # Promise 19.
    config = make()
    config.actor.optim.lr = 0.125
    read, lost = from_stored(stored_by_0_8_0(config), "0.8.0")
    assert lost == []
    assert (read.actor.optim.lr, read.rollout.min_p) == (0.125, 0.25)
    config.rollout.min_p = 0.25
    assert read == config


def test_an_added_setting_gets_the_value_of_the_old_behavior(table):
    diff = compare_text(stored_by_0_8_0(make()), make(), "0.8.0")
    assert [(change.key, change.stored, change.present) for change in diff.trajectory] == [("rollout.min_p", 0.25, 0.0)]
    present = make()
    present.rollout.min_p = 0.25
    assert compare_text(stored_by_0_8_0(make()), present, "0.8.0").trajectory == []


def test_only_migrations_of_later_releases_are_applied(table):
    tree = {"actor": {"lr": 1, "optim": {"learning_rate": 2}}}
    assert migrate(tree, "0.9.0").tree == {
        "actor": {"optim": {"learning_rate": 2, "lr": 1}},
        "rollout": {"min_p": 0.25},
    }
    assert migrate(tree, "1.0.0").tree == migrate(tree, "1.1.0.dev0").tree == tree
    # This version precedes 1.0.0, so it may lack some of 1.0.0's changes.
    assert migrate(tree, "1.0.0.dev0").tree == migrate(tree, "0.9.0").tree


@pytest.mark.parametrize("release", [None, "0", "of somebody", "1.0.0.dev0"])
def test_a_migration_skips_settings_that_have_the_new_name_already(table, release):
    tree = {"actor": {"optim": {"lr": 1}}, "rollout": {"min_p": 0.5}}
    assert migrate(tree, release).tree == tree


def test_a_setting_moves_into_a_section_that_is_stored_as_null(table):
    moved = migrate({"actor": {"lr": 0.5, "optim": None}}, "0.9.0")
    assert moved.tree["actor"] == {"optim": {"lr": 0.5}}
    assert moved.lost == []


def test_a_removed_section_leaves_nothing_behind(table):
    assert "old" not in migrate(sections(stored_by_0_8_0(make())), "0.8.0").tree


def test_a_removed_setting_with_another_value_is_a_changed_setting(table):
    # Promise 13.
    diff = compare_text(stored_by_0_8_0(make(), speed=5), make(), "0.8.0")
    change = next(change for change in diff.trajectory if change.key == "old.speed")
    assert (change.stored, change.present, change.removed) == (5, 3, "0.9.0")
    with pytest.raises(UserError, match=r"old\.speed: 5 in the checkpoint, 3 now") as caught:
        reject_changes(diff, allow=False)
    assert "with the release that saved the checkpoint" in str(caught.value)
    reject_changes(diff, allow=True)


def test_an_unknown_stored_key_does_not_fit_this_version(table):
    text = stored_by_0_8_0(make()) + "surprise: {a: 1}\n"
    with pytest.raises(UserError, match=r"do not fit this version of rlhf.*surprise"):
        compare_text(text, make(), "0.8.0")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("actor.optim.learning_rate=1", "Release 1.0.0 renamed it. Did you mean actor.optim.lr?"),
        ("actor.lr=1", "Release 1.0.0 renamed it. Did you mean actor.optim.lr?"),
        ("old.speed=2", "Release 0.9.0 removed it. Leave it out: the speed is 3."),
        ("actor.lr", "write actor.optim.lr=VALUE"),
    ],
)
def test_an_old_name_on_the_command_line_gets_a_hint(table, typed, message):
    with pytest.raises(UserError) as caught:
        compose("recipes=null", typed)
    assert message in str(caught.value)


def test_an_old_name_in_a_recipe_gets_a_hint(table, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("# @package _global_\nactor:\n  lr: 1\n")
    with pytest.raises(UserError, match=r"renamed it\. Did you mean actor\.optim\.lr"):
        compose("recipes=mine", config_dir=tmp_path)


def test_every_reader_sees_the_present_names(monkeypatch, tmp_path):
    monkeypatch.setattr(
        migrations, "MIGRATIONS", {"1.0.0": (Renamed("keep", "checkpoint.max_to_keep"), Renamed("files", "model.path"))}
    )
    config = make()
    config.checkpoint.max_to_keep = 7
    tree = sections(to_yaml(config))
    tree["keep"] = tree["checkpoint"].pop("max_to_keep")
    text = yaml.safe_dump(tree)
    assert parse_rules(text.encode()).max_to_keep == 7
    assert stored_settings(text)["checkpoint.max_to_keep"] == 7
    path = publish(tmp_path, 2, config=text)
    manifest = replace(read_manifest(path), fingerprints={"files": "f"})
    (path / MANIFEST).unlink()
    write_manifest(path, manifest)
    assert read_manifest(path).fingerprints == {"model.path": "f"}


@pytest.mark.parametrize(
    ("stored", "steps", "filters", "bound"),
    # Without dynamic sampling, the old setting had no effect on responses in flight.
    [
        *[(1, 0, False, 1), (0, 0, False, 1), (3, 1, False, 1), (0, 1, False, 1), (1, 4, False, 4)],
        *[(0, 0, True, 0), (3, 1, True, 3), (1, 4, True, 4)],
    ],
)
def test_filter_groups_max_staleness_migrates_to_rollout_max_staleness(stored, steps, filters, bound):
    settings = {"rollout__async_steps": steps, "algorithm__filter_groups__enable": filters}
    tree = sections(to_yaml(make(**settings)))
    del tree["rollout"]["max_staleness"]
    tree["algorithm"]["filter_groups"]["max_staleness"] = stored
    read, lost = from_stored(yaml.safe_dump(tree), "0.1.0")
    assert (read.rollout.max_staleness, lost) == (bound, [])
    assert read == make(**settings, rollout__max_staleness=bound)


@pytest.mark.parametrize(("stored", "dtype"), [("float32", None), ("bfloat16", "bfloat16")])
def test_the_old_default_of_a_reference_dtype_becomes_the_new_default(stored, dtype):
    tree = sections(to_yaml(make(actor__use_kl_loss=True)))
    tree["ref"]["fsdp_config"]["model_dtype"] = stored
    read, lost = from_stored(yaml.safe_dump(tree), "0.1.0")
    assert (read.ref.fsdp_config.model_dtype, lost) == (dtype, [])


def test_typing_filter_groups_max_staleness_suggests_rollout_max_staleness():
    with pytest.raises(UserError) as caught:
        compose("algorithm.filter_groups.max_staleness=2")
    assert "algorithm.filter_groups.max_staleness" in str(caught.value)
    assert "renamed it. Did you mean rollout.max_staleness?" in str(caught.value)


def test_the_migration_table_is_sorted_and_ends_at_the_schema():
    releases = [migrations.Version(release) for release in MIGRATIONS]
    assert releases == sorted(set(releases))
    changes = [change for of_release in MIGRATIONS.values() for change in of_release]
    gone = {change.key for change in changes if isinstance(change, Removed | Renamed)}
    made = {
        change.to if isinstance(change, Renamed) else change.key
        for change in changes
        if not isinstance(change, Removed)
    }
    assert made - gone <= SETTINGS.keys()
    assert not (gone - made) & SETTINGS.keys()
    assert all(setting_of(key) is not None for key in made - gone)
