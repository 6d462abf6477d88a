"""Runs that earlier releases left: this tree resumes them, restores every bit, and finishes them.

`tests/support/release_checkpoints.py` makes them. The bits of later steps are compared only if the numerics
version and the place (`digests.place`: torch, processor, switches) are those of the release.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.checkpoint.commit import manifest
from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.config.known_settings import SETTINGS, setting_of
from rlhf.config.migrations import migrate
from rlhf.config.resolved import from_stored
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from rlhf.numerics import NUMERICS
from rlhf.storage.layout import CONFIG, MANIFEST
from tests.support import older_schema
from tests.support.compare_runs import history
from tests.support.digests import place
from tests.support.engines import NEEDS_DEEPSPEED
from tests.support.hashes import hash_file
from tests.support.launching import Ended, ranks, saved_steps
from tests.support.release_checkpoints import RUNS, SAVED, STEPS, command, releases, run_dir, unpack
from tests.support.restored_state import environment, recorded

CASES = [
    pytest.param(release, name, marks=[NEEDS_DEEPSPEED] if name.startswith("zero") else [])
    for release in releases()
    for name in RUNS
]


def resume(folder: Path, name: str, *more: str, variables: dict[str, str] | None = None) -> Ended:
    """Run the command of a run again, in the folder with its files."""
    variables = {**environment(folder / "record"), **(variables or {})}
    return ranks(folder / "log", [*command(name), *more], variables, RUNS[name].nproc, folder)


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def agrees(found: Any, expected: Any) -> bool:
    """Return whether `found` contains everything in `expected`. Later releases may record more."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(key in found and agrees(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(agrees, found, expected))
    return found == expected


def assert_restored(folder: Path, expected: dict[str, Any]) -> None:
    found = recorded(folder / "record", "restored")
    assert len(found) == len(expected["restored"])
    for of_rank, expected_of_rank in zip(found, expected["restored"], strict=True):
        for part, value in expected_of_rank.items():
            assert agrees(of_rank[part], value), (part, of_rank[part], value)


@pytest.mark.parametrize(("release", "name"), CASES)
def test_an_older_run_is_restored_exactly_and_finished(release, name, tmp_path):
    # Promise 19, promise 3.
    everything = unpack(release, tmp_path)
    expected = everything["runs"][name]
    run, checkpoint = run_dir(tmp_path, name), run_dir(tmp_path, name) / f"global_step_{SAVED}"
    saved = read_manifest(checkpoint)
    before = bytes_below(checkpoint)
    end = resume(tmp_path, name)
    assert end.code == EXIT_DONE, end.output
    assert_restored(tmp_path, expected)
    assert bytes_below(checkpoint) == before
    assert saved_steps(run) == [STEPS, SAVED]
    assert [record["step"] for record in history(run)] == [record["step"] for record in expected["history"]]
    assert ("numerics version" in end.output) == (saved.numerics != NUMERICS)
    if (saved.numerics, everything["place"]) == (NUMERICS, place()):
        assert recorded(tmp_path / "record", "final") == expected["final"]
        assert agrees(history(run), expected["history"])


def store_as_older(folder: Path, name: str, **values: Any) -> None:
    """Give the checkpoint of a run the configuration that an older schema (`older_schema.TABLE`) would have stored.
    `values` may change the removed setting, `trainer.speed=3`."""
    root = run_dir(folder, name) / f"global_step_{SAVED}"
    tree = yaml.safe_load((root / CONFIG).read_text())
    tree["actor"]["learning_rate"] = tree["actor"]["optim"].pop("lr")
    del tree["rollout"]["min_p"]
    tree["trainer"] |= {"speed": 3} | values
    (root / CONFIG).write_text(yaml.safe_dump(tree))
    size, hashes = hash_file(root / CONFIG)
    payload = json.loads((root / MANIFEST).read_text())["payload"]
    payload["files"][CONFIG] |= {"size": size, "xxh3_128": hashes}
    payload |= {"config_hash": "0" * 32, "versions": payload["versions"] | {"rlhf": "0.0.9"}}
    (root / MANIFEST).write_bytes(manifest._text(payload))


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("zero2_lora", marks=NEEDS_DEEPSPEED)])
def test_a_rename_a_removal_and_an_addition_change_nothing(name, tmp_path):
    # Promise 19.
    expected = unpack("0.1.0", tmp_path)["runs"][name]
    store_as_older(tmp_path, name)
    end = resume(tmp_path, name, variables=older_schema.environment())
    assert end.code == EXIT_DONE, end.output
    assert_restored(tmp_path, expected)


def test_a_changed_setting_without_migration_does_not_fit_this_version(tmp_path):
    unpack("0.1.0", tmp_path)
    store_as_older(tmp_path, "fsdp2")
    end = resume(tmp_path, "fsdp2")
    assert end.code == EXIT_USER_ERROR
    assert "do not fit this version of rlhf" in end.output
    assert saved_steps(run_dir(tmp_path, "fsdp2")) == [SAVED]


def test_a_removed_setting_with_another_value_stops_the_resume(tmp_path):
    # Promise 13.
    unpack("0.1.0", tmp_path)
    store_as_older(tmp_path, "fsdp2", speed=5)
    end = resume(tmp_path, "fsdp2", variables=older_schema.environment())
    assert end.code == EXIT_USER_ERROR
    assert "trainer.speed: 5 in the checkpoint, 3 now" in end.output


@pytest.mark.parametrize("release", releases())
def test_every_schema_change_since_a_release_has_a_migration(release, tmp_path):
    """If this test fails, add the missing line to `rlhf/config/migrations.py`."""
    unpack(release, tmp_path)
    text = (run_dir(tmp_path, "fsdp2") / f"global_step_{SAVED}" / CONFIG).read_text()
    tree = migrate(yaml.safe_load(text), release).tree
    assert set(leaves(tree)) == SETTINGS.keys()
    from_stored(text, release)


def leaves(section: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the settings in a tree of sections. A free mapping counts as one setting."""
    found = []
    for name, value in section.items():
        key = f"{prefix}{name}"
        found += leaves(value, f"{key}.") if isinstance(value, dict) and setting_of(key) is None else [key]
    return found
