"""Simulates nodes with separate disks as folders, and a rank's start and run there, for tests of storage domains."""

import json
from pathlib import Path

from rlhf.checkpoint.start.domains import find_domains
from rlhf.config import Config
from rlhf.storage.layout import HISTORY
from tests.support.checkpoints import make_config
from tests.support.saving_behind import Run
from tests.support.sections import finished_step, prepare
from tests.support.thread_ranks import make_coordinator


def on_node(tmp_path: Path, node: int, *, behind: bool = True) -> Config:
    """Return the configuration on the node `node`."""
    config = make_config(tmp_path / f"node_{node}")
    config.checkpoint.async_save = behind
    return config


def start(rank: int, config: Config) -> Run:
    """Run a rank's start up to the training."""
    coordinator = make_coordinator()
    coordinator.domains = find_domains(config.run_dir, coordinator)
    prepare(config, coordinator)
    return Run(rank, config, coordinator)


def save(rank: int, tmp_path: Path, nodes: list[int], steps: int) -> dict:
    """Start, resume if possible, and save each of `steps` further steps."""
    config = on_node(tmp_path, nodes[rank])
    run = start(rank, config)
    run.checkpointer.resume()
    for _ in range(steps):
        step = run.step()
        if rank == 0:
            with (config.run_dir / HISTORY).open("a") as history:
                history.write(json.dumps({"step": step}) + "\n")
        run.checkpointer.save(step, {"val/accuracy": 0.5})
    run.checkpointer.finish()
    return run.everything()


def resume(rank: int, tmp_path: Path, nodes: list[int]) -> tuple[bool, dict, int | None]:
    config = on_node(tmp_path, nodes[rank])
    run = start(rank, config)
    resumed = run.checkpointer.resume()
    return resumed, run.everything(), finished_step(config, run.coordinator)
