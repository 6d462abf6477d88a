"""Retention and freeing of disk space in real saves on two ranks. Each save has a new checkpointer, as after a
restart."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.config import Config
from rlhf.errors import UserError
from tests.support.checkpoints import PlainRole, make_checkpointer, make_config, resume, run_ranks
from tests.support.published import steps
from tests.support.small_disks import small_disk
from tests.support.thread_ranks import make_coordinator, run_thread_ranks
from tests.support.verified import verify

FLOATS = 200_000  # 0.8 MB of weights and as much of moments over all ranks
DEADLINE_S = 60
ACCURACY = {2: 0.5, 4: 0.9, 6: None, 8: 0.1, 10: 0.2}


def save(rank: int, config: Config, *figures: tuple[int, float | None]) -> list[str | list[int | None]]:
    """Save each step with its accuracy. Return for each save the steps that exist after it, or the error."""
    coordinator = make_coordinator()
    seen: list[str | list[int | None]] = []
    for step, accuracy in figures:
        role = PlainRole(FLOATS, rank, coordinator.world_size, seed=step)
        checkpointer = make_checkpointer(config, role, step, coordinator)
        try:
            checkpointer.save(step, {} if accuracy is None else {"val/accuracy": accuracy})
        except UserError as error:
            seen.append(str(error))
            continue
        # The leader applies retention, so it is done once all ranks are here.
        coordinator.all_gather(None)
        seen.append(steps(config.run_dir))
        coordinator.all_gather(None)
    return seen


def test_the_rules_act_on_the_metrics_of_each_save(tmp_path):
    config = make_config(tmp_path)
    config.checkpoint.async_save = False
    config.checkpoint.max_to_keep, config.checkpoint.keep_every, config.checkpoint.keep_best = 1, 6, 1
    figures = ACCURACY.items()
    one, other = run_ranks(2, save, config, *figures, deadline_s=DEADLINE_S, join=tmp_path / "join")
    assert one == other == [[2], [4], [4, 6], [4, 6, 8], [4, 6, 10]]
    assert read_manifest(config.run_dir / "global_step_4").metrics == {"val/accuracy": 0.9}
    assert read_manifest(config.run_dir / "global_step_6").metrics == {}


@pytest.fixture
def small_config(tmp_path) -> Iterator[Config]:
    """The configuration of a run directory on a disk of 6 MiB."""
    with small_disk(tmp_path / "disk", 6) as disk:
        yield make_config(disk)


def fill(config: Config, leave: int) -> Path:
    """Write another program's file that leaves `leave` bytes of the disk free."""
    filler = config.run_dir / "filler"
    stats = os.statvfs(config.run_dir)
    filler.write_bytes(bytes(stats.f_bavail * stats.f_frsize - leave))
    return filler


def test_a_save_without_space_removes_old_checkpoints_or_is_an_error(small_config):
    small_config.checkpoint.async_save = False
    small_config.checkpoint.max_to_keep = 2

    def on_ranks(*figures: tuple[int, float | None]) -> list:
        return run_thread_ranks(2, save, small_config, *figures, deadline_s=DEADLINE_S)

    assert on_ranks((2, None), (4, None)) == [[[2], [2, 4]]] * 2
    # A save writes 1.6 MB and asks for 2.6 MiB. The free 1.2 MB are not enough before step 2 is removed.
    filler = fill(small_config, leave=1_200_000)
    assert on_ranks((6, None)) == [[[4, 6]]] * 2
    # Removing steps 4 and 6 would be enough, but step 6 is the newest. Step 4 alone is not enough: nothing is removed.
    filler.unlink()
    filler = fill(small_config, leave=600_000)
    for (message,) in on_ranks((8, None)):
        assert (
            "the save needs 2.6 MiB and the disk has 0.6 MiB free; removing global_step_4, which retention" in message
        )
        assert re.search(r"would free only 1\.\d MiB", message)
    assert steps(small_config.run_dir) == [4, 6]
    filler.unlink()
    assert on_ranks((10, None)) == [[[6, 10]]] * 2
    assert [verify(small_config.run_dir / f"global_step_{step}").step for step in (6, 10)] == [6, 10]
    assert resume(small_config, PlainRole(FLOATS)) == 10
