"""Stores the state of one server for the loop of the fleet."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.rollout.servers.client import ServerClient
from rlhf.rollout.servers.dispatch import Concurrency
from rlhf.rollout.servers.health import ServerHealth
from rlhf.rollout.servers.server_process import ServerProcess

NO_ANSWER = "no answer yet"


@dataclass
class Member:
    """A server of the fleet: its health, its client, and the tasks that call it."""

    number: int
    health: ServerHealth
    client: ServerClient
    url: str
    concurrency: Concurrency
    process: ServerProcess | None = None
    log: Path | None = None
    starts: int = 0
    pushing: bool = False
    tasks: dict[asyncio.Task, int] = field(default_factory=dict)
    """Each request's task, with the index of the request. The server knows the request by the task's name."""
    abort: asyncio.Task | None = None
    probe: asyncio.Task | None = None
    probe_error: str = NO_ANSWER
    """Error of the last probe; empty if the probe succeeded."""

    def describe(self) -> str:
        where = f"log: {self.log}" if self.log is not None else "given by rollout.servers.urls"
        return f"{self.url}: {self.health.state}; {'; '.join(self.health.reasons) or 'no failure'}; {where}"
