"""python -m rlhf.status follows a real run through a SIGKILL of its rank and of its supervisor, in a real terminal."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rlhf.cli.status import main
from rlhf.errors import EXIT_USER_ERROR
from rlhf.storage.layout import RESOLVED
from rlhf.tracking.live_state import read_state
from rlhf.tracking.page.server import PageServer
from rlhf.tracking.status_text import status_lines
from tests.support.forked_start import train_forked
from tests.support.interrupter import at
from tests.support.launching import small
from tests.support.refusals import says
from tests.support.run_folders import run_folder
from tests.support.terminal import Terminal

QUICK = (
    "data.train_batch_size=2",
    "rollout.n=2",
    "actor.ppo_mini_batch_size=2",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "checkpoint.async_save=false",  # else a kill in step 2 may come before the checkpoint of step 1
    "trainer.restart_backoff_s=0",
    "actor.optim.lr_warmup_steps=0",
)


@pytest.fixture(scope="module")
def survivor(tmp_path_factory) -> Path:
    """A finished run whose rank was killed once."""
    from tests.support.launching import write_sums

    folder = tmp_path_factory.mktemp("survivor")
    sums = write_sums(folder / "sums.jsonl")
    end = train_forked(small(folder, "survivor", sums, *QUICK), at("update.after", 2, "SIGKILL", once=folder / "hit"))
    assert end.code == 0, end.output
    assert (folder / "hit").exists()
    return folder / "rlhf" / "survivor"


def test_a_killed_and_resumed_run_has_its_crash_in_the_status_and_the_page(survivor):
    state = read_state(survivor)
    assert (state.state, state.step, state.total_steps, state.restarts) == ("finished", 3, 3, 1)
    assert state.checkpoint is not None
    assert state.checkpoint[0] == 3
    says(state.causes, "rank 0", "SIGKILL", "step 2")
    page = (survivor / "report" / "report.html").read_text()
    for fact in ("SIGKILL", "restart 1 of", ">resumed<", ">finished<"):
        assert fact in page


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_status_fits_a_terminal(survivor, tmp_path, columns):
    terminal = Terminal(columns, tmp_path, "-m", "rlhf.status", survivor, "--watch")
    assert terminal.end() == 0
    assert terminal.shows("survivor [finished]")
    assert terminal.shows("step 3/3")
    assert terminal.shows("restarts 1")
    assert max(map(len, terminal.lines)) < columns
    assert terminal.is_left_in_order, terminal.text


def test_watch_follows_a_run_through_a_kill_and_its_restart(tmp_path):
    """A process of this test holds the run's lock. The test kills it and starts it again."""
    run = run_folder(tmp_path / "a", 4, events=[{"time": time.time(), "event": "started"}])
    holder = (
        "import sys, time; from pathlib import Path; from rlhf.ranks.lock import run_lock\n"
        "with run_lock(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(600)"
    )

    def hold() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", holder, run], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    first = hold()
    terminal = Terminal(80, tmp_path, "-m", "rlhf.status", run, "--watch")
    try:
        terminal.wait_for("a [running]")
        os.kill(first.pid, signal.SIGSTOP)
        terminal.wait_for("a [hung]")
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        terminal.wait_for("a [crashed]")
        first = hold()
        terminal.wait_for("a [running]")
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), "event": "finished"}) + "\n")
        assert terminal.end() == 0
        assert terminal.shows("a [finished]")
    finally:
        first.kill()
        first.wait()
        terminal.process.close(force=True)


def test_a_folder_without_run_or_a_repeated_run_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, str(tmp_path), "not a run directory")
    run = run_folder(tmp_path / "a", 2)
    assert main([str(run), str(run)]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "same run")
    (run / "metrics.jsonl").write_text("{\n")
    assert main([str(run)]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "metrics.jsonl", "damaged", "Remove the line")
    (run / "metrics.jsonl").write_text('{"step": 2, "reward/mean": "x"}\n')
    assert main([str(run)]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "metrics.jsonl", "damaged", "reward/mean")


def test_states_of_runs_without_a_process(tmp_path):
    assert read_state(run_folder(tmp_path / "new", 0)).state == "not started"
    gone = run_folder(tmp_path / "gone", 2)
    assert read_state(gone).state == "crashed"
    assert read_state(gone).reason.endswith("; the same command continues the run")
    settings = (gone / RESOLVED).read_text()
    (gone / RESOLVED).write_text(settings.replace("  overwrite: false\n", "  overwrite: true\n"))
    assert read_state(gone).reason.endswith("; the same command without trainer.overwrite=true continues the run")
    for kind, state in (("stopped", "stopped"), ("failed", "crashed"), ("finished", "finished")):
        events = [{"time": 1.0, "event": "started"}, {"time": 2.0, "event": kind, "cause": "why"}]
        found = read_state(run_folder(tmp_path / kind, 2, events=events))
        assert (found.state, found.causes) == (state, ("why",))


def test_the_status_shows_the_evaluation_that_the_report_shows(tmp_path):
    """If scores are not only 0 and 1, that is the reward, although a part of the sources has an accuracy."""
    values = {"val/accuracy": 0.25, "val/reward": 0.5}
    known = "\n".join(status_lines("a", read_state(run_folder(tmp_path / "a", 2, **values)), 200))
    assert "held-out accuracy 25.0%" in known
    assert "held-out reward" not in known
    values["val-core/sums/reward/mean@1"] = 0.5
    graded = "\n".join(status_lines("b", read_state(run_folder(tmp_path / "b", 2, **values)), 200))
    assert "held-out reward 0.500" in graded
    assert "held-out accuracy" not in graded


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_lines_are_no_longer_than_the_terminal(tmp_path, width):
    events = [{"time": 1.0, "event": "crashed", "cause": f"{'long ' * 60}{'x' * 90}", "restart": 1}]
    state = read_state(run_folder(tmp_path / ("n" * 100), 2, events=events))
    lines = status_lines("n" * 100, state, width)
    assert max(map(len, lines)) <= width
    says(lines, "restarts 1", "last cause")


def test_the_server_answers_its_key_only(tmp_path):
    import threading

    with PageServer([run_folder(tmp_path / "a", 20)], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(server.address, timeout=60) as answer:
            page = answer.read().decode()
            assert answer.headers["Cache-Control"] == "no-store"
        assert 'data-reload="10"' in page
        root = f"http://{server.host}/"
        foreign = urllib.request.Request(server.address, headers={"Host": "evil.example"})
        post = urllib.request.Request(server.address, data=b"x")
        for request, code in ((root, 404), (f"{root}{server.key[:-1]}/", 404), (foreign, 404), (post, 501)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            assert refused.value.code == code
        assert server.server_address[0] == "127.0.0.1"
        server.shutdown()
