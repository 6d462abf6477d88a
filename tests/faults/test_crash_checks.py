"""Checks of the node after two crashes in a row with the same cause: what they find, and that they delay nothing."""

import json
import time
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE
from rlhf.launch import crash_checks
from rlhf.launch.crash_checks import node_problems
from rlhf.launch.stop_request import StopRequest
from rlhf.storage.layout import EVENTS, RESOLVED
from tests.support import rank_scripts
from tests.support.rank_scripts import RANK
from tests.support.refusals import says

PROBLEM = "warning: devices: 1000 ranks share"


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    """Settings of a run on the CPU; the checks read a stored configuration with far too many ranks."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(crash_checks, "DEADLINE_S", 120.0)  # a busy machine
    config = Config()
    config.model.path = "none"
    t = config.trainer
    t.default_local_dir, t.device, t.nproc = str(tmp_path / "runs"), "cpu", 1000
    t.warm_start, t.restart_backoff_s = False, 0.01
    config.run_dir.mkdir(parents=True)
    (config.run_dir / RESOLVED).write_text(to_yaml(config))
    t.nproc = 1
    return config


def crashes(config: Config) -> list[dict]:
    events = map(json.loads, (config.run_dir / EVENTS).read_text().splitlines())
    return [event for event in events if event["event"] in ("crashed", "failed")]


def test_the_second_crash_with_one_cause_has_the_nodes_problems(config, tmp_path, caplog):
    config.trainer.max_failures_per_step = 3
    script = 'status.event(number, "x")\nif number < 4: raise SystemExit(41 if number < 3 else 43)\n'
    assert rank_scripts.supervised(config, tmp_path / "rank.py", RANK + script) == EXIT_DONE
    details = [event["details"] for event in crashes(config)]
    assert [PROBLEM in text for text in details] == [False, True, False]
    says(details[1], "same cause", PROBLEM, "Set trainer.nproc=")
    assert sum(PROBLEM in record.getMessage() for record in caplog.records) == 1


def test_the_report_at_the_end_of_the_run_has_them_too(config, tmp_path):
    config.trainer.max_failures_per_step = 2
    script = 'status.event(1, "x")\nraise SystemExit(41)\n'
    assert rank_scripts.supervised(config, tmp_path / "rank.py", RANK + script) == EXIT_CRASHED
    assert PROBLEM in crashes(config)[-1]["details"]


def test_checks_that_fail_or_are_late_or_unwanted_find_nothing(config, monkeypatch):
    run_dir, stop = config.run_dir, StopRequest()
    assert [line[: len(PROBLEM)] for line in node_problems(run_dir, stop)] == [PROBLEM]
    monkeypatch.setattr(crash_checks, "DEADLINE_S", 0.1)
    begin = time.monotonic()
    assert node_problems(run_dir, stop) == []
    assert time.monotonic() - begin < 5
    monkeypatch.setattr(crash_checks, "DEADLINE_S", 1000.0)
    stop.request("SIGTERM")
    assert node_problems(run_dir, stop) == []
    (run_dir / RESOLVED).write_text("broken: [")
    assert node_problems(run_dir, StopRequest()) == []
    (run_dir / RESOLVED).unlink()
    assert node_problems(run_dir, StopRequest()) == []
