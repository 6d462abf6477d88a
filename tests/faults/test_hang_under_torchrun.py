"""Hung ranks under torchrun: their node's watchdog finds them and kills all ranks, and torchrun restarts the run."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhf.config import Config, ModelConfig
from rlhf.config.resolved import to_yaml
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import EXIT_DONE
from rlhf.launch import node_watchdog
from rlhf.launch.hangs import HangDetector
from rlhf.launch.interface import Stacks
from rlhf.launch.node_watchdog import OtherNodes
from rlhf.ranks.status import RankStatus
from rlhf.ranks.stop import STOP_SIGNALS
from rlhf.ranks.watchdog_process import MODULE
from rlhf.storage.layout import RESOLVED, RUN_LOG
from tests.support.compare_runs import differences
from tests.support.hanger import hangs
from tests.support.launching import small, train
from tests.support.undisturbed import EXPORT

DEADLINE_S = 15
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
# `hanger` hangs a rank before the rank's status shows the event, so the watchdog reports the event before (PHASES).
# Rank 0, which is stopped, is the parent of the watchdog.
PLAN = (("rollout.after", 2, 1, "hold_the_gil"), ("update.mid", 9, 0, "stop_forever"))
PHASES = ("rollout.before", "update.before")


@pytest.mark.slow
def test_each_hang_is_found_and_killed_and_torchrun_restarts_the_run(tmp_path, sums, undisturbed):
    command = [*small(tmp_path, "hung", sums), EXPORT, f"trainer.watchdog_timeout_s={DEADLINE_S}"]
    end = train(command, hangs(tmp_path, *PLAN), TORCHRUN)
    assert end.code == EXIT_DONE, end.output
    assert len(list(tmp_path.glob("hung_*"))) == len(PLAN)
    run_dir = tmp_path / "rlhf" / "hung"
    log = (run_dir / RUN_LOG).read_text()
    for text in (end.output, log):
        stories = text.split("watchdog: error: Hang: ")[1:]
        assert len(stories) == len(PLAN), text
        for (_, _, rank, _), phase, story in zip(PLAN, PHASES, stories, strict=True):
            found = re.match(rf"rank {rank}: no progress for (\d+) s after {phase} ", story)
            assert found, story
            assert DEADLINE_S <= int(found[1]) <= DEADLINE_S + 6
            assert f"rank {1 - rank} is here:" in story
        assert " in hold_the_gil" in stories[0].split("rank 1 hangs here:\n")[1].splitlines()[0]
        assert "rank 0 hangs here:\n    stopped, as by SIGSTOP or a debugger" in stories[1]
    assert "The same command continues from" in log
    assert differences(undisturbed.run_dir(2), run_dir) == []


class Rank:
    """The watchdog's view of one rank of a node."""

    def __init__(self, rank: int) -> None:
        self.rank, self.status = rank, RankStatus(1, "update.before", 0.0, None)

    def move(self) -> None:
        self.status = RankStatus(1, "update.mid", time.monotonic(), None)

    def statuses(self) -> dict[int, RankStatus]:
        return {self.rank: self.status}

    def stacks(self, ranks: list[int]) -> Stacks:
        return Stacks(silent=dict.fromkeys(ranks, "not asked"))


def test_a_rank_that_waits_for_another_node_does_not_hang(monkeypatch):
    """The ranks of node 0 are overdue. This is a hang only when no rank of node 1 makes progress or node 1 is
    silent."""
    monkeypatch.setattr(node_watchdog, "REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(node_watchdog, "SILENCE_S", 1.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, detectors = [Rank(0), Rank(1)], []
    for rank in ranks:
        here = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        detector = HangDetector(TrainerConfig(watchdog_timeout_s=1.5), 900.0, OtherNodes(here, rank.rank, 2, "attempt"))
        detector.start([rank.rank])
        detectors.append(detector)

    def look(node: int):
        return detectors[node].look(ranks[node], [node])

    end = time.monotonic() + 6
    while time.monotonic() < end:
        ranks[1].move()
        assert look(0) is None
        assert look(1) is None
        time.sleep(0.1)
    end = time.monotonic() + 60
    while (hang := look(0)) is None:
        assert look(1) is None or time.monotonic() < end, "60 s passed, and only node 1 found a hang"
        assert time.monotonic() < end, "60 s passed without progress, and node 0 found no hang"
        time.sleep(0.1)
    assert hang.rank == 0


def test_a_node_kills_its_ranks_when_the_others_have_logged_the_hang(monkeypatch):
    """Each node logs its evidence before any node kills, because ranks fail when another node's ranks are killed."""
    monkeypatch.setattr(node_watchdog, "SILENCE_S", 30.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def node(number: int, attempt: str) -> OtherNodes:
        here = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        return OtherNodes(here, number, 2, attempt)

    first, second, later = node(0, "first"), node(1, "first"), node(1, "second")
    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        killed = pool.submit(first.announce_hang)
        while not second.are_silent(save=False):
            assert time.monotonic() - started < 20, "the second node heard nothing of the hang"
            time.sleep(0.05)
        assert not killed.done(), "the second node has logged nothing yet"
        assert not later.are_silent(save=False), "that was another start of the ranks"
        second.announce_hang()
        killed.result(20)
    monkeypatch.setattr(node_watchdog, "SILENCE_S", 1.0)
    started = time.monotonic()
    later.announce_hang()
    assert 1 <= time.monotonic() - started < 20, "a node that answers no more may still log its evidence"


def test_a_store_that_does_not_answer_is_not_taken_for_silent_nodes(monkeypatch):
    monkeypatch.setattr(node_watchdog, "SILENCE_S", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = OtherNodes(
        dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False), 0, 2, "attempt"
    )
    others.report(save=False)
    assert not others.are_silent(save=False)
    del store
    end = time.monotonic() + 60
    while not others.are_silent(save=False):
        assert time.monotonic() < end
        time.sleep(0.1)


STORE = """
import time
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_stopped_store_process_is_not_taken_for_silent_nodes(monkeypatch):
    """Without torchrun, the store is in rank 0, which may be the stopped rank."""
    monkeypatch.setattr(node_watchdog, "SILENCE_S", 0.2)
    monkeypatch.setattr(node_watchdog, "STORE_TIMEOUT_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE) as rank_0:
        assert rank_0.stdout is not None
        port = int(rank_0.stdout.readline())
        others = OtherNodes(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), 1, 2, "attempt")
        assert not others.are_silent(save=False)
        os.kill(rank_0.pid, signal.SIGSTOP)
        end = threading.Timer(60, rank_0.kill)  # a wait for the stopped store would last forever: end it
        end.start()
        while not others.are_silent(save=False):
            time.sleep(0.1)
        assert rank_0.poll() is None
        end.cancel()
        rank_0.kill()


def ignores(pid: int, number: int) -> bool:
    masks = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(masks["SigIgn"], 16) >> (number - 1) & 1)


def test_the_watchdog_ignores_the_signal_to_save_and_exit(tmp_path):
    """SLURM sends the signal to all processes. The watchdog watches the ranks until they have saved."""
    (tmp_path / RESOLVED).write_text(to_yaml(Config(model=ModelConfig(path="policy"))))
    rank = subprocess.Popen(["sleep", "600"])
    command = [sys.executable, "-m", MODULE, str(tmp_path), json.dumps({0: rank.pid}), "0", "1", "attempt"]
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 60
        while not all(ignores(watchdog.pid, number) for number in STOP_SIGNALS):
            assert watchdog.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        for number in STOP_SIGNALS:
            watchdog.send_signal(number)
        time.sleep(0.2)
        assert watchdog.poll() is None
        rank.kill()
        rank.wait()
        assert watchdog.wait(60) == 0
    finally:
        rank.kill()
        watchdog.kill()
