"""Two nodes on this machine for `benchmarks.goodput`: each has a disk, memory, and a network address of its own.

Needs root: a node is a mount namespace with a tmpfs and a network namespace, joined to the other by a virtual cable.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.goodput_notes import note

ADDRESSES, PORT = ("10.77.0.1", "10.77.0.2"), 29555
CUT_S = 5.0
POLL_S = 0.05
_RESTARTS = 1000


@dataclass
class Node:
    """A node: the process whose namespaces it is, and its end of the cable."""

    holder: subprocess.Popen
    cable: str

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.holder.pid}", "--mount", "--net", *command]

    def seen_from_outside(self, path: Path) -> Path:
        """Return the path by which processes of all nodes reach a path of this node."""
        return Path(f"/proc/{self.holder.pid}/root{path}")

    def processes(self) -> list[int]:
        """Return the ids of all processes of the node but its holder."""
        own = Path(f"/proc/{self.holder.pid}/ns/mnt").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (entry / "ns/mnt").readlink() == own:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.holder.pid]

    def kill(self) -> None:
        """Kill all processes of the node."""
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def connect(self, connected: bool) -> None:
        state = "up" if connected else "down"
        subprocess.run(self.inside("ip", "link", "set", self.cable, state), check=True)


@contextmanager
def two_nodes(disk: Path) -> Iterator[list[Node]]:
    """Yield two nodes, each with its own tmpfs at `disk`, that end with the block."""
    disk.mkdir()
    nodes: list[Node] = []
    try:
        for number in (0, 1):
            script = f"mount -t tmpfs none {disk} && ip link set lo up && echo ready && exec sleep infinity"
            command = ["unshare", "--mount", "--net", "sh", "-c", script]
            holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            nodes.append(Node(holder, f"goodput{number}"))
            assert holder.stdout is not None
            if (answer := holder.stdout.readline().strip()) != "ready":
                raise RuntimeError(f"two nodes on one machine need root and namespaces: {answer}")
        first, second = (node.cable for node in nodes)
        subprocess.run(["ip", "link", "add", first, "type", "veth", "peer", "name", second], check=True)
        for node, address in zip(nodes, ADDRESSES, strict=True):
            subprocess.run(["ip", "link", "set", node.cable, "netns", str(node.holder.pid)], check=True)
            subprocess.run(node.inside("ip", "addr", "add", f"{address}/24", "dev", node.cable), check=True)
            node.connect(True)
        yield nodes
    finally:
        for node in nodes:
            with suppress(OSError):
                node.kill()
            node.holder.kill()
            node.holder.wait()


def train(
    nodes: Sequence[Node], disk: Path, folder: Path, arguments: list[str], environment: Mapping[str, str]
) -> None:
    """Run the trainer under torchrun on both nodes until it ends, and do what `folder / "wanted"` names meanwhile.

    `node`: the second node loses its processes, disk and memory, and all nodes start again, as a scheduler requeues a
    job. `network`: the cable is unplugged for CUT_S seconds.

    Raises:
        RuntimeError: the run ended with an error; with the output.
    """
    wanted = folder / "wanted"
    while True:
        started = [_start(node, rank, folder, arguments, environment) for rank, node in enumerate(nodes)]
        lost = False
        while not lost and any(process.poll() is None for process in started):
            time.sleep(POLL_S)
            kind = wanted.read_text() if wanted.exists() else ""
            wanted.unlink(missing_ok=True)
            if kind == "network":
                begun = time.time()
                nodes[1].connect(False)
                time.sleep(CUT_S)
                nodes[1].connect(True)
                note(folder, kind=kind, begun=begun)
            elif kind == "node":
                for node in nodes:
                    node.kill()
                for path in nodes[1].seen_from_outside(disk).iterdir():
                    shutil.rmtree(path)
                lost = True
        codes = [process.wait() for process in started]
        if not lost:
            if any(codes):
                logs = "".join((folder / f"node_{rank}.log").read_text()[-3000:] for rank in range(len(nodes)))
                raise RuntimeError(f"the run failed:\n{logs}")
            return


def _start(
    node: Node, rank: int, folder: Path, arguments: list[str], environment: Mapping[str, str]
) -> subprocess.Popen:
    torchrun = ["-m", "torch.distributed.run", f"--nnodes={len(ADDRESSES)}", f"--node-rank={rank}"]
    torchrun += ["--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
    command = node.inside(sys.executable, *torchrun, f"--max-restarts={_RESTARTS}", "-m", "rlhf.train", *arguments)
    with (folder / f"node_{rank}.log").open("a") as log:
        return subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": node.cable} | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
