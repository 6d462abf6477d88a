"""A whole run under torchrun on two nodes that share no disk: a kill in the commit, swapped nodes, a lost disk, a node
lost with disk and memory.

A node is a mount namespace with its own disk, or a folder if the machine allows no namespaces.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlhf.ranks.memory_folder import PREFIX
from rlhf.storage.layout import scan, step_dir, step_of
from tests.support.compare_runs import differences
from tests.support.hanger import hangs
from tests.support.interrupter import at
from tests.support.launching import DEADLINE_S, ROOT, Ended, flip_a_byte, records, saved_steps, small
from tests.support.undisturbed import EXPORT


@dataclass
class Node:
    """A node: the path of its disk as seen from here, and the prefix that starts a command in the root of that disk."""

    disk: Path
    prefix: list[str] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.disk / "checkpoints" / "rlhf" / "two_nodes"

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen:
        return subprocess.Popen(
            [*self.prefix, *command],
            cwd=None if self.prefix else self.disk,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def nodes(tmp_path) -> Iterator[list[Node]]:
    """Two nodes. With namespaces, the disks of both have the same path, which is a different tmpfs on each node."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs none {disk} && cd {disk} && echo ready && exec sleep 3600"
    holders: list[subprocess.Popen[str]] = []
    try:
        for _ in (0, 1):
            command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount]
            holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            holders.append(holder)
            assert holder.stdout is not None
            if (answer := holder.stdout.readline().strip()) != "ready":
                warnings.warn(f"no mount namespaces here, nodes are folders: {answer}", stacklevel=1)
                break
        else:
            yield [_in_namespace(holder.pid, disk) for holder in holders]
            return
        folders = [tmp_path / f"node_{number}" for number in (0, 1)]
        for folder in folders:
            folder.mkdir()
        yield [Node(folder) for folder in folders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _in_namespace(pid: int, disk: Path) -> Node:
    enter = ["nsenter", f"--target={pid}", "--user", "--mount", "--preserve-credentials", "--wd"]
    return Node(Path(f"/proc/{pid}/root{disk}"), enter)


def train_on(
    nodes: list[Node], sums: Path, environment: dict[str, str] | None = None, *more: str, restarts: int = 0
) -> list[Ended]:
    """Start one run on `nodes`, in this order, with `more` settings. Return how it ended on each.

    The undisturbed run has whole replicas, because it is on one machine. With `dp_replicate=2` each of
    two nodes has a whole replica, too.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [*small(Path("checkpoints"), "two_nodes", sums), EXPORT, "backend.dp_replicate=2", *more]
    processes = []
    for rank, node in enumerate(nodes):
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1"]
        torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}", f"--max-restarts={restarts}"]
        command = [sys.executable, *torchrun, "-m", "rlhf.train", *arguments]
        processes.append(node.start(command, environment or {}))
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [Ended(process.returncode, text) for process, text in zip(processes, outputs, strict=True)]


def merged(nodes: list[Node], folder: Path) -> Path:
    """Merge the run into one directory: the first node's disk, and the second node's files of each checkpoint."""
    shutil.copytree(nodes[0].run_dir, folder, ignore=shutil.ignore_patterns("*.lock"))
    for step in saved_steps(nodes[1].run_dir):
        shutil.copytree(step_dir(nodes[1].run_dir, step), step_dir(folder, step), dirs_exist_ok=True)
    return folder


@pytest.mark.slow
def test_a_run_that_is_killed_and_swapped_ends_like_one_that_is_not(tmp_path, sums, undisturbed, nodes):
    expected = undisturbed.run_dir(2)
    a, b = nodes
    # A kill between the renames of the second commit (step 6): node a has renamed, node b has not.
    ends = train_on([a, b], sums, at("commit.rename", 2, "SIGKILL", rank=1))
    assert all(end.code != 0 for end in ends), ends
    assert "The ranks have 2 storage domains: ranks 0; ranks 1." in ends[0].output
    assert saved_steps(b.run_dir) == [3]
    # The nodes start in another order, and are killed before any step.
    ends = train_on([b, a], sums, at("update.before", 1, "SIGKILL", rank=0))
    assert all(end.code != 0 for end in ends), ends
    completed = "Completed the commit of step 6, interrupted between the nodes' disks."
    assert completed in ends[0].output
    assert "Resumed step 6" in ends[0].output
    assert [saved_steps(node.run_dir) for node in (a, b)] == [[6, 3], [6, 3]]
    # The nodes start in the first order again, and train to the end.
    ends = train_on([a, b], sums)
    assert [end.code for end in ends] == [0, 0], ends
    assert differences(expected, merged(nodes, tmp_path / "whole")) == []
    assert [record["step"] for record in records(a.run_dir)] == list(range(1, 8))
    assert not (b.run_dir / "metrics.jsonl").exists()
    # One node has an empty disk.
    shutil.rmtree(b.disk / "checkpoints")
    before = [path.name for path in scan(a.run_dir)]
    ends = train_on([a, b], sums)
    assert all(end.code != 0 for end in ends), ends
    assert "global_step_7 is not complete: no node's disk has" in ends[0].output
    assert "will not start again at step 0 by itself" in ends[0].output
    assert [path.name for path in scan(a.run_dir)] == before


@pytest.mark.slow
def test_a_hang_on_one_node_is_found_on_both_and_the_run_is_restarted(tmp_path, sums, undisturbed, nodes):
    """Each node logs its own ranks' stacks only. The waiting node knows that the other is overdue, too."""
    hang = hangs(tmp_path, ("rollout.after", 2, 1, "sleep_forever"))
    ends = train_on(nodes, sums, hang, "trainer.watchdog_timeout_s=15", restarts=2)
    assert [end.code for end in ends] == [0, 0], ends
    waiting, hung = (end.output.split("watchdog: error: Hang: ")[1:] for end in ends)
    assert len(waiting) == len(hung) == 1, ends
    assert waiting[0].startswith("rank 0: no progress for ")
    assert "/torch/distributed/" in waiting[0]
    assert " in sleep_forever" in hung[0].split("rank 1 hangs here:\n")[1].splitlines()[0]
    assert differences(undisturbed.run_dir(2), merged(nodes, tmp_path / "whole")) == []


def memory_of(node: Node) -> Path:
    """Return the folder of a node's snapshots in memory."""
    [folder] = node.disk.glob(f"{PREFIX}*")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_with_its_memory_and_disk_costs_no_step(lost, tmp_path, sums, undisturbed, nodes):
    """Promise 21."""
    if not nodes[0].prefix:
        pytest.skip("needs mount namespaces: both nodes must have their memory at the same path")
    memory = f"checkpoint.memory.dir={tmp_path / 'disk'}", "checkpoint.memory.freq=1", "checkpoint.memory.replicas=1"
    # A kill in step 3, before the first save. Then one copy of a part is damaged.
    ends = train_on(nodes, sums, at("update.mid", 5, "SIGKILL", rank=1), *memory)
    assert all(end.code != 0 for end in ends), ends
    [newest] = {scan(memory_of(node))[0].name for node in nodes}
    assert newest in ("global_step_1", "global_step_2")
    flip_a_byte(memory_of(nodes[lost]) / newest / f"actor/optimizer/rank_0000{lost}.safetensors")
    # A kill in the fourth step after that. Then a node loses everything.
    ends = train_on(nodes, sums, at("update.mid", 7, "SIGKILL", rank=lost), *memory)
    assert all(end.code != 0 for end in ends), ends
    assert f"{newest} is damaged on the node of rank {lost}" in ends[0].output
    assert f"Resumed step {newest.removeprefix('global_step_')} from" in ends[0].output
    published = step_of(scan(memory_of(nodes[1 - lost]))[0])
    begun = int(newest.removeprefix("global_step_")) + 4
    assert published in (begun - 2, begun - 1)
    for path in nodes[lost].disk.iterdir():
        shutil.rmtree(path)
    ends = train_on(nodes, sums, None, *memory)
    assert [end.code for end in ends] == [0, 0], ends
    assert f"Resumed step {published} from" in ends[0].output
    found = differences(undisturbed.run_dir(2), merged(nodes, tmp_path / "whole"))
    if lost == 0:  # the metric history and the samples were on this node's disk only
        assert [record["step"] for record in records(nodes[0].run_dir)] == list(range(published + 1, 8))
        found = [line for line in found if not line.startswith(("steps of the", "metrics of", "samples/"))]
    assert found == []
    assert [list(node.disk.glob(f"{PREFIX}*")) for node in nodes] == [[], []]
