"""Loads of a checkpoint: the bytes that each rank reads, and the metrics of the load."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.load.locations import FileLocations
from rlhf.checkpoint.load.restoring import LoadResult, load_state
from rlhf.checkpoint.state.run_state import RunState
from rlhf.checkpoint.state.throughput import Throughput
from rlhf.config import Config
from rlhf.storage.hashing import BLOCK
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import PlainReference, PlainRole, make_checkpointer, make_config, make_driver, run_ranks
from tests.support.thread_ranks import make_coordinator, run_thread_ranks

DEADLINE_S = 90
SIZE = 3 << 20
CONTENTS = ["model", "optimizer", "extra", "hf_model"]


def save(rank: int, config: Config) -> None:
    coordinator = make_coordinator()
    role = PlainRole(SIZE, rank, coordinator.world_size)
    reference = PlainReference(SIZE, rank, coordinator.world_size)
    make_checkpointer(config, role, 1, coordinator, reference=reference).save(1)


def load(rank: int, config: Config, contents: list[str]) -> LoadResult:
    coordinator, path = make_coordinator(), step_dir(config.run_dir, 1)
    world_size = coordinator.world_size
    roles = {"actor": PlainRole(SIZE, rank, world_size, seed=5)}
    state = RunState(roles, make_driver(), reference=PlainReference(SIZE, rank, world_size))
    return load_state(FileLocations.whole(path, read_manifest(path)), state, contents, 1, coordinator)


def in_folders(config: Config, *folders: str) -> int:
    manifest = read_manifest(step_dir(config.run_dir, 1))
    return sum(entry["size"] for folder in folders for entry in manifest.in_folder(folder).values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[int], Config]:
    """A function that returns the configuration of a run saved by `writers` ranks. Tests do not change it."""

    @functools.cache
    def by(writers: int) -> Config:
        config = make_config(tmp_path_factory.mktemp(f"saved_{writers}"))
        config.checkpoint.contents = list(CONTENTS)
        run_thread_ranks(writers, save, config, deadline_s=DEADLINE_S)
        return config

    return by


@pytest.mark.parametrize(
    ("writers", "readers", "in_processes"),
    [(1, 1, False), (2, 2, False), (1, 2, False), (2, 1, False), (3, 2, True)],
)
def test_each_rank_reads_what_it_needs_and_every_byte_is_read(tmp_path, saved, writers, readers, in_processes):
    config = saved(writers)
    for contents, folders in (
        (CONTENTS, ["actor/model", "actor/optimizer"]),
        (["model"], ["actor/model"]),
        (["optimizer", "hf_model"], ["actor/optimizer", "actor/huggingface"]),
    ):
        if in_processes:
            join = Path(tempfile.mkdtemp(dir=tmp_path))
            result, *others = run_ranks(readers, load, config, contents, deadline_s=DEADLINE_S, join=join)
        else:
            result, *others = run_thread_ranks(readers, load, config, contents, deadline_s=DEADLINE_S)
        assert all(other.by_part == result.by_part for other in others)
        assert set(result.by_part) == {"actor", "ref", "other"}
        # Ranks that share a block all read it. All ranks read the headers of the files.
        twice = readers * len(folders) * 2 * BLOCK if readers != writers or "hf_model" in contents else readers * 1000
        needed = in_folders(config, *folders)
        assert result.by_part["actor"].bytes <= needed + twice
        assert result.by_part["ref"].bytes <= in_folders(config, "ref/model") + readers * 2 * BLOCK
        manifest = read_manifest(step_dir(config.run_dir, 1))
        assert result.total_bytes >= sum(entry["size"] for entry in manifest.files.values())
        # The seconds are the slowest rank's. It may have started earlier, so they may exceed this rank's whole load.
        assert all(part.seconds > 0 for part in result.by_part.values())


def test_the_metrics_of_a_load():
    parts = {"actor": Throughput(600, 2.0), "other": Throughput(40, 0.0)}
    metrics = LoadResult(Path("x"), None, parts, 4.0).metrics()  # type: ignore[arg-type]
    assert metrics["perf/load_seconds"] == 4.0
    assert metrics["perf/load_bytes"] == 640
    assert metrics["perf/load_bytes_per_second"] == 160
    assert metrics["perf/load_bytes_per_second/actor"] == 300
    assert metrics["perf/load_bytes/other"] == 40
    assert len(metrics) == 9
