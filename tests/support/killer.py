"""Kills processes of a run at exact events by RLHF_EVENT_LISTENER, driven by a plan file.

The plan is a JSON list of kills. Each rank finds the first kill that has not fired. The kill's `observer` rank waits
for its `event` after the publication of a checkpoint of at least `after_step`, and sends SIGKILL to the `victim`. A
marker file, written before the signal, shows that the kill fired and prevents another kill after the restart. Under
Ray, the victim may also be a rank's `WORKER`, the `COMMAND`, or a `NODE`, for whose loss the killer asks with a file.

The ranks survive two victims: `SERVER`, one of the run's rollout servers, and `NETWORK`, the observer's connections to
all servers, which then answer nothing for `CUT_S` seconds. Both are hit `GENERATING_S` seconds after the event.

At an event of a background save, its thread blocks until the loop has passed `ahead` more events or waits for the save.
The marker then contains the number of events that the loop passed.
"""

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rlhf.ranks.parent import PARENT_PID, SUPERVISOR_PID
from rlhf.storage.layout import scan, step_of

PLAN_VARIABLE = "RLHF_TEST_KILL_PLAN"
LONGEST_WAIT_S = 3.0
SERVER, NETWORK = "server", "network"
SURVIVED = (SERVER, NETWORK)
WORKER, COMMAND, NODE = "worker_", "command", "node"
GENERATING_S, CUT_S = 0.1, 3.0


class Killer:
    def __init__(self, plan: Path) -> None:
        self.folder = plan.parent
        self.run_dir = Path(plan.with_name("run_dir").read_text())
        self.rank = int(os.environ["RANK"])
        (self.folder / f"pid_{self.rank}").write_text(str(os.getpid()))
        (self.folder / f"pid_{WORKER}{self.rank}").write_text(os.environ.get(PARENT_PID, ""))
        self.plan = json.loads(plan.read_text())
        self.kill = self.next_kill()
        self.hits_servers = False
        self.loop_events = 0
        self.loop_waits = False

    def next_kill(self) -> dict | None:
        return next((kill for kill in self.plan if not self.marker(kill).exists()), None)

    def marker(self, kill: dict) -> Path:
        return self.folder / f"fired_{kill['id']:04d}"

    def on_event(self, event: str) -> None:
        if self.hits_servers:
            return
        if self.kill is not None and self.kill["victim"] in SURVIVED and self.marker(self.kill).exists():
            self.kill = self.next_kill()
        kill, behind = self.kill, threading.current_thread() is not threading.main_thread()
        if not behind:
            self.loop_events += 1
            self.loop_waits = event in ("commit.wait", "memory.wait")
        if kill is None or event != kill["event"] or self.rank != kill["observer"]:
            return
        newest = next((step_of(path) for path in scan(self.run_dir)), 0)
        if newest < kill["after_step"]:
            return
        if kill["victim"] in SURVIVED:
            self.hits_servers = True
            threading.Thread(target=self.hit_servers, args=(kill,), daemon=True).start()
            return
        came_further = self.wait_for_events(kill["ahead"]) if behind else ""
        with self.marker(kill).open("x") as marker:
            marker.write(str(came_further))
        if kill["victim"] == NODE:
            (self.folder / NODE).touch()
        else:
            os.kill(self.pid_of(kill["victim"]), signal.SIGKILL)
        # The victim is another process: stay at this point until its death ends this rank, too.
        time.sleep(60)
        raise AssertionError(f"rank {self.rank} outlived kill {kill}")

    def hit_servers(self, kill: dict) -> None:
        """Kill a server or cut the connections to all servers. The next kill waits for the marker file."""
        time.sleep(GENERATING_S)
        servers = servers_of_run()
        assert servers, "no rollout server runs"
        if kill["victim"] == SERVER:
            os.killpg(servers[kill["id"] % len(servers)].pid, signal.SIGKILL)
        else:
            for server in servers:
                server.suspend()
            cut_connections({int(server.cmdline()[-1]) for server in servers})
            time.sleep(CUT_S)
            for server in servers:
                server.resume()
        self.marker(kill).touch()
        self.hits_servers = False

    def wait_for_events(self, ahead: int) -> int:
        """Wait for the loop's next `ahead` events, and return their number."""
        before, end = self.loop_events, time.monotonic() + LONGEST_WAIT_S
        while self.loop_events < before + ahead and not self.loop_waits and time.monotonic() < end:
            time.sleep(0.001)
        return self.loop_events - before

    def pid_of(self, victim: str) -> int:
        if victim == "supervisor":
            return int(os.environ[SUPERVISOR_PID])
        return int((self.folder / f"pid_{victim}").read_text())


def servers_of_run() -> list[psutil.Process]:
    """Return the main processes of the run's rollout servers, which end their command lines with their port."""
    found = psutil.Process(int(os.environ[SUPERVISOR_PID])).children(recursive=True)
    with suppress(psutil.NoSuchProcess):
        return [each for each in found if "rlhf.rollout.servers" in each.cmdline() and "--port" in each.cmdline()]
    return []


def cut_connections(ports: set[int]) -> None:
    """Break this process's connections to ports of this machine."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port in ports:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as same:
                same.shutdown(socket.SHUT_RDWR)


_killer: Killer | None = None


def on_event(event: str) -> None:
    """Fire planned kills. The plan is read at the first event."""
    global _killer
    if _killer is None:
        _killer = Killer(Path(os.environ[PLAN_VARIABLE]))
    _killer.on_event(event)
