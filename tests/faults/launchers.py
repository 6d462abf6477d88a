"""Launchers of the killed runs of a campaign: how a run starts, and which processes are killed."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.support.forked_start import train_forked
from tests.support.killer import COMMAND, NODE, WORKER
from tests.support.ray_cluster import Cluster, ray_cluster

DEADLINE_S = 1800
RAY_NODES = 2
OF_RAY = ("", WORKER, "", NODE, WORKER, COMMAND)
"""Victims under Ray in turn: a rank (""), a rank's worker, the second node, and the command."""


class Launcher(Protocol):
    """Starts runs and waits for their end."""

    def settings(self, nproc: int, more: Sequence[str]) -> list[str]:
        """Return the settings with which this launcher starts `nproc` ranks, besides the settings `more`."""

    def victims(self, plan: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the kills of a plan for a supervisor's run, with victims that exist under this launcher."""

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Run `rlhf.train` to its end, append its output to `log`, and return its exit code."""


class Local:
    """The supervisor, forked from a server with the imports done."""

    def settings(self, nproc: int, more: Sequence[str]) -> list[str]:
        return []

    def victims(self, plan: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [dict(kill) for kill in plan]

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        ended = train_forked(arguments, dict(environment), DEADLINE_S)
        with log.open("a") as output:
            output.write(ended.output)
        return ended.code


class Ray:
    """A Ray cluster of two nodes on this machine, with one rank each. A lost node is replaced.

    Args:
        folder: the folder of the killer's plan.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder

    def settings(self, nproc: int, more: Sequence[str]) -> list[str]:
        replicas = [] if any(text.startswith("backend=") for text in more) else [f"backend.dp_replicate={nproc}"]
        return ["trainer.nproc=1", f"trainer.nnodes={nproc}", *replicas]

    def victims(self, plan: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        kills = []
        for number, kill in enumerate(plan):
            kind, rank = OF_RAY[number % len(OF_RAY)], number // 2 % RAY_NODES
            kills.append({**kill, "victim": f"{kind}{rank}" if kind in ("", WORKER) else kind})
        return kills

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        own, end = log.with_suffix(".ray"), time.monotonic() + DEADLINE_S
        process = self._cluster.start(arguments, environment, own)
        (self._folder / f"pid_{COMMAND}").write_text(str(process.pid))
        try:
            while (code := process.poll()) is None and time.monotonic() < end:
                if (asked := self._folder / NODE).exists():
                    asked.unlink()
                    self._cluster.do("lose")
                    self._cluster.do("add")
                time.sleep(0.1)
        finally:
            process.kill()
            with log.open("a") as output:
                output.writelines(self._cluster.output(own))
        assert code is not None, f"the run hangs: {log}"
        return code


@contextmanager
def started(name: str, folder: Path) -> Iterator[Launcher]:
    """Start what the launcher `name` needs, and stop it in the end."""
    if name == "local":
        yield Local()
        return
    with ray_cluster(folder / "ray") as cluster:
        yield Ray(cluster, folder)
