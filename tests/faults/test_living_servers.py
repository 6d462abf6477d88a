"""Whole runs with scripted servers of their own: the servers outlive the ranks, and never the supervisor."""

import re
import time
from pathlib import Path

import pytest

from rlhf.errors import EXIT_REQUEUE
from rlhf.ranks.parent import state_of
from tests.support import scripted_vllm_package
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.interrupter import at
from tests.support.launching import Ended, records, small

TOKEN_S = 0.05
IN_FLIGHT_S = 0.3
"""Seconds after the begin of a generation, when every request is on a server, and some have tokens left."""
DEADLINE_S = 60.0
STEPS, KILLED = 4, 3
SETTINGS = (
    "rollout=vllm_server",
    "rollout.servers.count=2",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.restart_backoff_s=0",
    "checkpoint.async_save=false",
)
ADOPTED = ["/pause?mode=abort&clear_cache=false", "/resume"]


class Folder:
    """Starts runs of this test's folder."""

    def __init__(self, path: Path, sums: Path) -> None:
        self.path, self._sums = path, sums
        self._scripted = scripted_vllm_package.environment(path / "packages", TOKEN_S)

    def start(self, name: str, interruption: dict[str, str] | None = None) -> Ended:
        return train_forked(small(self.path, name, self._sums, *SETTINGS), self._scripted | (interruption or {}))

    def run_dir(self, name: str) -> Path:
        return self.path / "rlhf" / name

    def logs(self, name: str) -> list[str]:
        found = sorted((self.run_dir(name) / "rollout_servers").glob("server_*.log"))
        assert len(found) == 2
        return [log.read_text() for log in found]

    def pids(self, name: str) -> list[int]:
        """Return the process ids of all servers that the run has started."""
        return [int(pid) for log in self.logs(name) for pid in re.findall(r"^scripted (\d+)$", log, re.MULTILINE)]

    def until_gone(self, name: str) -> None:
        """Wait until no server of the run is left."""
        assert self.pids(name)
        end = time.monotonic() + DEADLINE_S
        while any(state_of(pid) not in "ZX" for pid in self.pids(name)):
            assert time.monotonic() < end, f"servers of {name} are left"
            time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path, sums: Path) -> Folder:
    return Folder(tmp_path, sums)


def test_ranks_killed_in_a_generation_go_on_with_the_servers_that_live(folder: Folder):
    """The last checkpoint has the servers' weights, so nothing is pushed."""
    assert folder.start("undisturbed").code == 0
    kill = at("rollout.begin", KILLED, "SIGKILL", once=folder.path / "hit", after_s=IN_FLIGHT_S)
    end = folder.start("killed", kill)
    assert end.code == 0, end.output
    assert (folder.path / "hit").exists()
    assert end.output.count("Restart 1 of") == 1
    assert end.output.count("still runs and is used again") == 2
    assert end.output.count("still have the weights") in (1, 2)  # both servers at once, or one after the other
    assert len(folder.pids("killed")) == 2
    pushes = []
    for log in folder.logs("killed"):
        names = re.findall(r"^call (\S+)$", log, re.MULTILINE)
        adopted = names.index(ADOPTED[0])
        assert names[adopted : adopted + 2] == ADOPTED
        assert names[adopted:].count("/start_weight_update") == STEPS - KILLED
        pushes.append(names[:adopted].count("/finish_weight_update"))
    # The run starts with the first live server, so on a loaded machine the other server misses the first push.
    assert max(pushes) == KILLED
    assert min(pushes) > 0
    assert [record["step"] for record in records(folder.run_dir("killed"))] == list(range(1, STEPS + 1))
    assert differences(folder.run_dir("undisturbed"), folder.run_dir("killed")) == []
    folder.until_gone("killed")


@pytest.mark.parametrize(("what", "code"), [("SIGKILL", -9), ("SIGTERM", EXIT_REQUEUE)])
def test_no_server_outlives_the_supervisor(folder: Folder, what: str, code: int):
    kill = at("rollout.begin", 2, what, to="supervisor", after_s=IN_FLIGHT_S)
    end = folder.start("run", kill)
    assert end.code == code, end.output
    folder.until_gone("run")
    assert len(folder.pids("run")) == 2
