"""The real wandb client, offline and against a local stand-in for its server: one run, every step once and in order."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.tracking import History
from rlhf.tracking.sample_files import GENERATIONS
from tests.support.tracked import wandb_items
from tests.support.tracking_run import RUN_ID, metrics
from tests.support.wandb_server import serve

pytest.importorskip("wandb")

EXIT_KILLED = -signal.SIGKILL


def environment(run_dir: Path, url: str, key: str | None) -> dict[str, str]:
    made = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    made |= {"HOME": str(run_dir.parent / "home"), "WANDB_BASE_URL": url, "NO_PROXY": "*"}
    return made if key is None else made | {"WANDB_API_KEY": key}


def launch(
    run_dir: Path, mode: str, *arguments: str, url: str = "http://127.0.0.1:9", key: str | None = "a" * 40
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.tracking_run", str(run_dir), "wandb", mode, *arguments]
    return subprocess.run(command, env=environment(run_dir, url, key), capture_output=True, text=True, timeout=300)


def nested(item: dict, name: str) -> dict:
    """Remove the entries below `name` from `item`, and return them."""
    return {key.removeprefix(f"{name}."): item.pop(key) for key in list(item) if key.startswith(f"{name}.")}


def test_the_command_line_with_its_secrets_is_not_stored(tmp_path: Path) -> None:
    assert launch(tmp_path / "run", "offline", "none", "2", "reward.kwargs.api_key=typed-by-hand").returncode == 0
    (segment,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert len(wandb_items(segment, RUN_ID)) == 3
    assert not [path for path in segment.rglob("*") if path.is_file() and b"typed-by-hand" in path.read_bytes()]


def test_offline_run_is_one_file_with_every_step_after_kills(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert launch(run_dir, "offline", "none", "20", "12").returncode == EXIT_KILLED
    assert launch(run_dir, "offline", "10", "20", "14").returncode == EXIT_KILLED
    end = launch(run_dir, "offline", "10", "20")
    assert end.returncode == 0
    assert end.stdout == end.stderr == ""
    (segment,) = (run_dir / "wandb").glob("offline-run-*")
    assert len(list((run_dir / "wandb" / "superseded").iterdir())) == 2
    items = wandb_items(segment, RUN_ID)
    assert [item["_step"] for item in items] == list(range(21))
    for item in items:
        table = nested(item, GENERATIONS)
        assert {name: value for name, value in item.items() if name[0] != "_"} == metrics(item["_step"])
        assert bool(table) == (item["_step"] % 5 == 0)
        if table:
            assert f">says {item['_step']}</td>" in (segment / "files" / table["path"]).read_text()


@pytest.mark.slow
def test_rewinds_within_one_process_leave_one_offline_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # The rollbacks are so quick that several segments begin within one second.
    end = launch(run_dir, "offline", "none", "20", "12:10", "11:10", "14:0", "15:15")
    assert end.returncode == 0
    assert end.stdout == end.stderr == ""
    (segment,) = (run_dir / "wandb").glob("offline-run-*")
    assert len(list((run_dir / "wandb" / "superseded").iterdir())) == 4
    items = wandb_items(segment, RUN_ID)
    assert [item["_step"] for item in items] == list(range(21))
    assert [item["reward/mean"] for item in items] == [step / 7 for step in range(21)]
    # A crash after a rollback.
    assert launch(run_dir, "offline", "15", "23", "18:16", "19").returncode == EXIT_KILLED
    assert launch(run_dir, "offline", "18", "23").returncode == 0
    (segment,) = (run_dir / "wandb").glob("offline-run-*")
    assert [item["_step"] for item in wandb_items(segment, RUN_ID)] == list(range(24))


@pytest.mark.slow
def test_offline_run_syncs_to_a_server(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert launch(run_dir, "offline", "none", "20", "12").returncode == EXIT_KILLED
    assert launch(run_dir, "offline", "10", "20").returncode == 0
    (segment,) = (run_dir / "wandb").glob("offline-run-*")
    with serve() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-m", "wandb", "sync", str(segment)]
        made = environment(run_dir, url, "a" * 40)
        subprocess.run(command, env=made, cwd=tmp_path, check=True, capture_output=True, timeout=120)
        assert server.steps == list(range(21))


def test_online_run_continues_where_the_server_is(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with serve() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        # The server creates the run, but receives no step before the kill.
        assert launch(run_dir, "online", "none", "20", "12", url=url).returncode == EXIT_KILLED
        assert server.created
        # Resumed at 10: the server lacks steps up to 10 and gets them from the history.
        assert launch(run_dir, "online", "10", "13", url=url).returncode == 0
        assert server.steps == list(range(14))
        # Resumed at 10 again: the server is ahead by three steps, which are repeated and not sent twice.
        assert launch(run_dir, "online", "10", "20", url=url).returncode == 0
        assert server.steps == list(range(21))
        # A fresh start of a run that the server knows.
        assert launch(run_dir, "online", "none", "22", url=url).returncode == 0
    assert server.steps == list(range(23))
    assert [json.loads(line)["reward/mean"] for line in server.history] == [step / 7 for step in range(23)]


@pytest.mark.slow
def test_a_rewound_online_run_is_not_sent_what_the_server_has(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with serve() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        end = launch(run_dir, "online", "none", "20", "12:10", "11:4", "15:13", url=url)
        assert (end.returncode, end.stderr) == (0, "")
        assert server.steps == list(range(21))
        # The crash at step 25 comes while steps 23 to 27 are repeated after a rollback.
        assert launch(run_dir, "online", "20", "30", "27:22", "25", url=url).returncode == EXIT_KILLED
        assert launch(run_dir, "online", "22", "30", url=url).returncode == 0
    assert server.steps == list(range(31))
    assert [json.loads(line)["reward/mean"] for line in server.history] == [step / 7 for step in range(31)]
    assert [record["step"] for record in History(run_dir / "metrics.jsonl").records()] == list(range(31))


@pytest.mark.parametrize("trouble", ["no login", "no network"])
def test_a_failed_start_is_one_error_and_training_goes_on(tmp_path: Path, trouble: str) -> None:
    run_dir = tmp_path / "run"
    began = time.monotonic()
    end = launch(run_dir, "online", "none", "5", key=None if trouble == "no login" else "a" * 40)
    assert end.returncode == 0
    assert time.monotonic() - began < 90
    assert [record["step"] for record in History(run_dir / "metrics.jsonl").records()] == list(range(6))
    lines = [line for line in end.stderr.splitlines() if "training goes on" in line]
    assert len(lines) == 1
    assert ("WANDB_API_KEY" in lines[0]) == (trouble == "no login")
    assert end.stderr.count("\n") <= 2


def test_uploads_that_hang_do_not_hold_the_exit(tmp_path: Path) -> None:
    with serve() as server:
        server.uploads_hang.set()
        began = time.monotonic()
        end = launch(tmp_path / "run", "online", "none", "5", url=f"http://127.0.0.1:{server.server_port}")
        assert end.returncode == 0
        assert 2 <= time.monotonic() - began < 90
        assert "wandb failed to finish" in end.stderr


def test_a_blocked_folder_is_survived(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert launch(run_dir, "offline", "none", "3").returncode == 0
    (run_dir / "wandb" / "superseded").write_text("a file where the folder should be")
    end = launch(run_dir, "offline", "none", "3")
    assert end.returncode == 0
    assert "wandb failed to start" in end.stderr
