"""Starts a watchdog process on each node if no supervisor of the trainer watches the ranks, as under torchrun or srun.

The watchdog (`rlhf.launch.node_watchdog`) is a process of its own, because a rank that hangs may hold the GIL.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.parent import machine

MODULE = "rlhf.launch.node_watchdog"


@contextmanager
def node_watchdog(run_dir: Path, trainer: TrainerConfig, coordinator: Coordinator) -> Iterator[None]:
    """Run a watchdog for the ranks of each node, on Linux and unless `trainer.watchdog=false`. Collective.

    Ranks on one machine with one storage domain form a node. The lowest rank of a node starts the watchdog. The
    watchdog watches the lowest rank until the rank leaves the `with` block, and the other ranks until they end.
    """
    if not trainer.watchdog or sys.platform != "linux":
        yield
        return
    ranks = coordinator.all_gather((f"{machine()} {coordinator.domain}", os.getpid()))
    nodes = list(dict.fromkeys(node for node, _ in ranks))
    own_node = ranks[coordinator.rank][0]
    pids = {rank: pid for rank, (node, pid) in enumerate(ranks) if node == own_node}
    if coordinator.rank != min(pids):
        yield
        return
    attempt = xxhash.xxh3_64_hexdigest(repr(ranks).encode())  # every node computes the same hash
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            MODULE,
            str(run_dir),
            json.dumps(pids),
            str(nodes.index(own_node)),
            str(len(nodes)),
            attempt,
        ],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a stop signal must not end the watchdog before the ranks have saved
    )
    assert process.stdin is not None
    with process.stdin:
        yield
