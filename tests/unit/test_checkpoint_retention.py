import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.manifest import read_manifest, write_manifest
from rlhf.checkpoint.commit.removal import clean_leftovers, set_aside
from rlhf.checkpoint.commit.retention import NO_VALUE, reasons, retire, victims
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import Transport
from rlhf.storage.layout import MANIFEST, POINTER, TRASH, step_dir
from tests.support.checkpoints import flip_bit, listening
from tests.support.published import publish, steps
from tests.support.verified import verify

DEADLINE_S = 30.0
ACCURACY = "val/accuracy"
SINGLE_PROCESS = Coordinator(Transport())


def rules(max_to_keep: int | None = 1, keep_every: int | None = None, keep_best: int = 0) -> CheckpointConfig:
    return CheckpointConfig(max_to_keep=max_to_keep, keep_every=keep_every, keep_best=keep_best)


@pytest.fixture
def deleter() -> Iterator[Deleter]:
    deleter = Deleter()
    yield deleter
    assert deleter.wait(DEADLINE_S)


def retired(run_dir: Path, settings: CheckpointConfig, step: int, deleter: Deleter) -> list[int | None]:
    """The steps that retention removes after the save of `step`."""
    before = steps(run_dir)
    retire(run_dir, settings, step, deleter, SINGLE_PROCESS)
    return [step for step in before if step not in steps(run_dir)]


def names(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.iterdir()}


def kept(figures: dict[int, float | None], settings: CheckpointConfig) -> dict[int, str]:
    return {step: ", ".join(why) for step, why in reasons(figures, settings).items() if why}


def test_the_three_rules_and_their_union():
    figures: dict[int, float | None] = {4: 0.9, 8: 0.5, 12: NO_VALUE, 16: 0.7, 20: 0.1, 24: 0.6, 28: 0.2}
    assert kept(figures, rules(2)) == {28: "newest", 24: "newest"}
    # Saves are at multiples of 4, so the only multiples of 10 are those of 20.
    assert kept(figures, rules(1, keep_every=10)) == {28: "newest", 20: "for good"}
    assert kept(figures, rules(1, keep_best=2)) == {28: "newest", 16: "best", 4: "best"}
    assert kept(figures, rules(2, keep_every=12, keep_best=3)) == {
        28: "newest",
        24: "newest, for good, best",
        16: "best",
        12: "for good",
        4: "best",
    }
    assert kept(figures, rules(None)).keys() == figures.keys()
    assert kept(figures, rules(100)).keys() == figures.keys()


def test_an_unreadable_metric_matters_only_for_keep_best():
    figures: dict[int, float | None] = {2: None, 4: 0.5, 6: 0.1}
    assert kept(figures, rules(1)) == {6: "newest"}
    assert kept(figures, rules(1, keep_best=1)) == {6: "newest", 4: "best", 2: "unreadable"}


def test_the_newer_of_equals_is_the_better_one():
    assert kept({2: 0.5, 10: 0.5, 9: 0.5, 12: 0.1}, rules(1, keep_best=2)) == {12: "newest", 10: "best", 9: "best"}


@pytest.mark.parametrize("figure", [NO_VALUE, float("inf"), float("-inf")])
def test_a_metric_that_is_not_finite_is_never_best(figure):
    assert kept({2: figure, 4: -3.0, 6: 0.0}, rules(1, keep_best=3)) == {6: "newest, best", 4: "best"}


def test_keep_every_does_not_keep_step_0():
    assert kept({0: 0.1, 5: 0.2, 6: 0.3}, rules(1, keep_every=5)) == {6: "newest", 5: "for good"}


@pytest.mark.parametrize("seed", range(8))
def test_retention_keeps_the_same_checkpoints_as_rules_over_all_saves(seed, tmp_path, deleter):
    """After every save, the checkpoints on disk are those that the rules choose from all that were ever saved."""
    draw = random.Random(seed)
    settings = rules(draw.randint(1, 3), draw.choice([None, 6, 7]), draw.randint(0, 3))
    ever: dict[int, float | None] = {}
    for step in range(0, 40, 2):
        figure = draw.choice([NO_VALUE, draw.randint(0, 5) / 5])
        ever[step] = figure
        publish(tmp_path, step, {} if figure is NO_VALUE else {ACCURACY: figure, "val/reward": -figure})
        retired(tmp_path, settings, step, deleter)
        assert steps(tmp_path) == sorted(kept(ever, settings))


def test_a_removed_checkpoint_is_renamed_to_trash_first_and_deleted_later(tmp_path, deleter):
    for step in (8, 9, 10, 11):
        publish(tmp_path, step)
    seen = []
    with listening(lambda event: seen.append((event, steps(tmp_path)))):
        # Steps are compared as numbers, not as texts: 10 is newer than 9.
        assert retired(tmp_path, rules(2), 11, deleter) == [8, 9]
    assert seen == [
        ("commit.prune", [8, 9, 10, 11]),
        ("commit.trash", [9, 10, 11]),
        ("commit.prune", [9, 10, 11]),
        ("commit.trash", [10, 11]),
    ]
    assert deleter.wait(DEADLINE_S)
    assert names(tmp_path) == {"global_step_10", "global_step_11", POINTER}
    assert (tmp_path / POINTER).read_text() == "11\n"
    assert retired(tmp_path, rules(2), 11, deleter) == []
    assert retired(tmp_path, rules(None), 11, deleter) == []


def test_ranking_reads_the_metric_that_is_asked_for(tmp_path, deleter):
    for step, accuracy, reward in ((2, 0.9, -1.0), (4, 0.1, 5.0), (6, 0.5, 0.0)):
        publish(tmp_path, step, {ACCURACY: accuracy, "val/reward": reward})
    settings = rules(1, keep_best=1)
    assert victims(tmp_path, settings, 6, SINGLE_PROCESS) == [step_dir(tmp_path, 4)]
    settings.best_metric = "val/reward"
    assert victims(tmp_path, settings, 6, SINGLE_PROCESS) == [step_dir(tmp_path, 2)]


def test_keep_best_uses_the_headline_metric_unless_best_metric_is_set(tmp_path, deleter):
    """Accuracy does not rank runs whose scores are not 0 or 1, even if all scores of one evaluation are 0."""
    publish(tmp_path, 2, {ACCURACY: 0.0, "val/reward": 0.0})
    publish(tmp_path, 4, {ACCURACY: 0.1, "val/reward": -1.0, "val-core/all/reward/mean@1": -1.0})
    publish(tmp_path, 6, {ACCURACY: 0.0, "val/reward": -2.0, "val-core/all/reward/mean@1": -2.0})
    settings = rules(1, keep_best=1)
    assert settings.best_metric is None
    assert victims(tmp_path, settings, 6, SINGLE_PROCESS) == [step_dir(tmp_path, 4)]
    assert victims(tmp_path, settings, 6, SINGLE_PROCESS, {ACCURACY: 0.0, "val/reward": 1.0}) == [
        step_dir(tmp_path, 2),
        step_dir(tmp_path, 4),
    ]
    settings.best_metric = ACCURACY
    assert victims(tmp_path, settings, 6, SINGLE_PROCESS) == [step_dir(tmp_path, 2)]


def test_an_unreadable_later_checkpoint_does_not_evict_older_checkpoints(tmp_path, deleter):
    for step, accuracy in ((2, 0.1), (4, 0.5), (6, 0.9)):
        publish(tmp_path, step, {ACCURACY: accuracy})
    # Step 6 is unreadable, so the run resumed at step 4. It has now saved step 5.
    flip_bit(step_dir(tmp_path, 6) / MANIFEST, 100)
    publish(tmp_path, 5, {ACCURACY: 0.3})
    assert retired(tmp_path, rules(1, keep_best=1), 5, deleter) == [2]
    assert steps(tmp_path) == [4, 5, 6]
    assert retired(tmp_path, rules(1), 5, deleter) == [4]
    assert steps(tmp_path) == [5, 6]


@pytest.mark.parametrize("harm", ["flip", "remove", "unreadable"])
def test_a_checkpoint_whose_figure_cannot_be_known_is_not_removed_by_a_ranking(tmp_path, deleter, harm, caplog):
    # Promise 10.
    for step in (2, 4, 6, 8):
        publish(tmp_path, step, {ACCURACY: step / 10})
    manifest = step_dir(tmp_path, 4) / MANIFEST
    if harm == "flip":
        flip_bit(manifest, 100)
    else:
        manifest.unlink()
    if harm == "unreadable":  # a link to itself, whose error does not count as damage
        manifest.symlink_to(manifest)
    assert retired(tmp_path, rules(1, keep_best=1), 8, deleter) == [2, 6]
    assert "global_step_4 is kept, because it may be among the best" in caplog.text
    # Without a ranking it is an old checkpoint like any other.
    assert retired(tmp_path, rules(1), 8, deleter) == [4]


def test_checkpoints_without_metrics_are_removed_by_age(tmp_path, deleter):
    for step in (2, 4, 6):
        publish(tmp_path, step)
    assert retired(tmp_path, rules(1, keep_best=5), 6, deleter) == [2, 4]


def test_the_rules_count_the_checkpoint_about_to_be_saved(tmp_path):
    for step, accuracy in ((2, 0.2), (4, 0.4), (6, 0.1)):
        publish(tmp_path, step, {ACCURACY: accuracy})
    settings = rules(1, keep_best=1)
    paths = [step_dir(tmp_path, step) for step in (2, 4, 6)]
    assert victims(tmp_path, settings, 8, SINGLE_PROCESS, {ACCURACY: 0.9}) == paths
    assert victims(tmp_path, settings, 8, SINGLE_PROCESS, {ACCURACY: 0.3}) == [paths[0], paths[2]]
    assert victims(tmp_path, settings, 8, SINGLE_PROCESS, {}) == [paths[0], paths[2]]


def test_retention_ignores_folders_that_are_not_published_checkpoints(tmp_path, deleter):
    for step in (2, 4, 6):
        publish(tmp_path, step, {ACCURACY: 1 / step})
    # The best one is set aside: it neither counts as best nor is removed.
    set_aside(step_dir(tmp_path, 2), "superseded")
    for name in ("global_step_1.damaged-1", "global_step_x", "my_global_step_1", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_1").write_text("a file of that name is no checkpoint")
    others = names(tmp_path) - {"global_step_4"}
    assert retired(tmp_path, rules(1, keep_best=1), 6, deleter) == []
    assert retired(tmp_path, rules(1), 6, deleter) == [4]
    assert deleter.wait(DEADLINE_S)
    assert names(tmp_path) == others


def test_an_old_checkpoint_that_was_moved_and_linked_costs_only_the_link(tmp_path, deleter):
    archive, run_dir = tmp_path / "archive", tmp_path / "run"
    for step in (2, 4):
        publish(run_dir, step)
    step_dir(run_dir, 2).rename(archive)
    step_dir(run_dir, 2).symlink_to(archive)
    assert retired(run_dir, rules(1), 4, deleter) == [2]
    assert deleter.wait(DEADLINE_S)
    assert names(run_dir) == {"global_step_4", POINTER}
    assert verify(archive).step == 2


def test_a_failed_deletion_of_trash_is_logged_and_later_deletions_continue(tmp_path, deleter, caplog):
    for step in (2, 4, 6):
        publish(tmp_path, step)

    def remove(event: str) -> None:
        if event == "commit.trash" and steps(tmp_path) == [4, 6]:
            [trash] = tmp_path.glob(f"{TRASH}*")
            trash.rename(tmp_path / "taken")

    with listening(remove), caplog.at_level(logging.ERROR):
        assert retired(tmp_path, rules(1), 6, deleter) == [2, 4]
    assert deleter.wait(DEADLINE_S)
    assert ".trash-global_step_2" in caplog.text
    assert "could not be removed" in caplog.text
    assert names(tmp_path) == {"global_step_6", "taken", POINTER}


def test_a_removal_that_fails_does_not_fail_the_save(tmp_path, deleter, caplog):
    for step in (2, 4):
        publish(tmp_path, step)

    def fail(event: str) -> None:
        raise PermissionError(13, "Permission denied", "global_step_2")

    with listening(fail):
        assert retired(tmp_path, rules(1), 4, deleter) == []
    assert "An old checkpoint in" in caplog.text
    assert steps(tmp_path) == [2, 4]


def test_the_deleter_accepts_folders_while_it_deletes(tmp_path):
    deleter = Deleter()
    assert deleter.wait(0)
    for number in range(50):
        trash = tmp_path / f"{TRASH}{number}"
        trash.mkdir()
        (trash / "file").write_bytes(bytes(1000))
        deleter.submit(trash)
    assert deleter.wait(DEADLINE_S)
    assert names(tmp_path) == set()
    assert clean_leftovers(tmp_path) == []


def opened(folder: Path) -> Counter[str]:
    """Count how often each manifest below `folder` is opened from now on, by any call."""
    count: Counter[str] = Counter()

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).startswith(f"{folder}/") and Path(arguments[0]).name == MANIFEST:
            count[str(arguments[0])] += 1

    sys.addaudithook(note)
    return count


def test_no_manifest_of_a_thousand_checkpoints_is_read_twice(tmp_path, deleter, capsys):
    manifest = read_manifest(publish(tmp_path / "one", 2))
    run_dir, number = tmp_path / "run", 1000
    for step in range(1, number + 1):
        write_manifest(step_dir(run_dir, step), replace(manifest, step=step, metrics={ACCURACY: 1 / step}))
    count = opened(run_dir)
    assert main(["list", str(run_dir)]) == 0
    assert capsys.readouterr().out.count(" committed") == number
    assert set(count.values()) == {1}
    assert len(count) == number
    count.clear()
    # Each of three saves looks for the best of all checkpoints.
    settings = rules(900, keep_best=10)
    for step in range(number + 1, number + 4):
        write_manifest(step_dir(run_dir, step), replace(manifest, step=step, metrics={ACCURACY: 0.0}))
        victims(run_dir, settings, step, SINGLE_PROCESS, {ACCURACY: 0.0})
        retire(run_dir, settings, step, deleter, SINGLE_PROCESS)
    assert len(count) == number + 3
    assert max(count.values()) <= 2  # once to write it, once to read it
    assert sum(count.values()) <= number + 3 + 3
    assert len(steps(run_dir)) == 900 + 10
    # A manifest that changed since it was read is read again.
    flip_bit(step_dir(run_dir, 5) / MANIFEST, 100)
    retire(run_dir, rules(1, keep_best=1), number + 3, deleter, SINGLE_PROCESS)
    assert steps(run_dir) == [1, 5, number + 3]
