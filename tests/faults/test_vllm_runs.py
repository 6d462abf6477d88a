"""Whole runs with vLLM and with the embedded engine, on one real server: their accuracy, and the cost of a kill with
a batch in flight."""

import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf.errors import EXIT_CRASHED
from rlhf.rollout.servers.secret import VARIABLE, run_secret
from tests.support.interrupter import at
from tests.support.launching import ROOT, STEPS, TINY_POLICY, records, small, train
from tests.support.trained_on import recording, trained_on

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
]
READY_S = 240
CORRECTED = "algorithm.rollout_correction.rollout_is=token"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that the trainer did not start, with a shared secret."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, "of-servers-and-runs-here")
        yield from serve(tmp_path_factory)


def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the server until the generator is closed."""
    port = listening_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable,
        "-m",
        "rlhf.rollout.servers",
        str(TINY_POLICY),
        "--port",
        str(port),
        "--dtype",
        "float32",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    try:
        while True:
            health = urllib.request.Request(f"{url}/health", headers=run_secret(log).headers)
            with suppress(OSError), urllib.request.urlopen(health, timeout=5):
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def listening_port() -> int:
    """Return a free port below 32768, so that no connection of another test takes it while the server loads."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000))) as free:
            return free.getsockname()[1]


def test_every_engine_learns_the_offline_task(server, tmp_path: Path, launches: ThreadPoolExecutor) -> None:
    engines = {
        "embedded": [],
        "vllm": ["rollout=vllm"],
        "server": ["rollout=vllm_server", f"rollout.servers.urls=[{server}]"],
    }

    def run(name: str) -> list[dict]:
        length = ["trainer.total_training_steps=12", "trainer.test_freq=12", "trainer.save_freq=0"]
        place = [f"trainer.default_local_dir={tmp_path}", f"trainer.experiment_name={name}", "trainer.device=cpu"]
        end = train([*place, *length, "trainer.threads_per_rank=1", *engines[name]])
        assert end.code == 0, end.output
        return records(tmp_path / "rlhf" / name)

    histories = dict(zip(engines, launches.map(run, engines), strict=True))
    before = {name: history[0]["val/accuracy"] for name, history in histories.items()}
    after = {name: history[-1]["val/accuracy"] for name, history in histories.items()}
    # All three engines decode greedily with the same weights.
    assert before["vllm"] == before["server"] == before["embedded"]
    assert min(after.values()) > 0.92, after
    assert max(after.values()) - min(after.values()) < 0.05, after
    for name in ("vllm", "server"):
        mismatch = [record["rollout/logprob_diff_max"] for record in histories[name][1:]]
        assert max(mismatch) < 1e-3, (name, mismatch)


def test_a_trainer_killed_with_responses_in_flight_trains_on_the_journal(server, sums, tmp_path: Path) -> None:
    in_flight = ["rollout=vllm_server", f"rollout.servers.urls=[{server}]", "rollout.async_steps=2", CORRECTED]
    saves = ["trainer.nproc=2", "trainer.restart_backoff_s=0", "checkpoint.async_save=false", "checkpoint.journal=true"]
    # The kill is in the update of step 5, after the save of step 3.
    interruption = at("update.before", 5, "SIGKILL", once=tmp_path / "hit")
    end = train(small(tmp_path, "killed", sums, *in_flight, *saves), recording(tmp_path / "killed", interruption))
    assert end.code == 0, end.output
    assert (tmp_path / "hit").exists()
    trained = trained_on(tmp_path / "killed")
    uids = [{uid for uid, _ in samples} for samples in trained.values()]
    assert [len(samples) for samples in trained.values()] == [8 * 4] * STEPS
    assert len(set().union(*uids)) == 8 * STEPS
    history = records(tmp_path / "rlhf" / "killed")
    assert max(record["sampling/token_staleness_max"] for record in history) in (1, 2)
    assert {record["step"]: record.get("perf/journal_samples") for record in history}[5] == 1


def test_an_unreachable_server_ends_the_run_with_its_url_and_error(sums, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    settings = [
        "rollout=vllm_server",
        f"rollout.servers.urls=[{nobody}]",
        "rollout.servers.start_timeout_s=2",
        "rollout.servers.max_failures=1",
        "rollout.servers.backoff_s=0",
        "trainer.max_failures_per_step=1",
    ]
    end = train(small(tmp_path, "nobody", sums, *settings))
    assert end.code == EXIT_CRASHED, end.output
    for words in (nobody, "rollout.servers.max_failures=1", "Cannot connect to host"):
        assert words in end.output


def test_the_runs_own_server_outlives_a_killed_trainer(sums, tmp_path: Path) -> None:
    settings = ["rollout=vllm_server", "rollout.servers.count=1", "trainer.restart_backoff_s=0"]
    end = train(small(tmp_path, "run", sums, *settings), at("update.before", 4, "SIGKILL", once=tmp_path / "hit"))
    assert end.code == 0, end.output
    assert (tmp_path / "hit").exists()
    assert end.output.count(": started, log in ") == 1
    assert end.output.count("still runs and is used again") == 1
    # The last checkpoint is of the step before the kill, whose weights the server has.
    assert end.output.count("still have the weights") == 1
    assert [record["step"] for record in records(tmp_path / "rlhf" / "run")] == list(range(1, STEPS + 1))
