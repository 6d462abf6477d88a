"""A run whose server applies adapters to its base (`rollout.lora=native`): the ranks are killed, then the server."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import launching
from tests.support.interrupter import at
from tests.support.launching import records, small, train

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
]
DEADLINE_S = 500.0
KILLED = 3
SETTINGS = (
    "rollout=vllm_server",
    "rollout.servers.count=1",
    "rollout.servers.backoff_s=0.1",
    "rollout.lora=native",
    "rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864",
    "model.lora.enabled=true",
    "model.lora.rank=4",
    "actor.optim.lr=2e-3",
    "trainer.total_training_steps=8",
    "trainer.save_freq=1",
    "trainer.restart_backoff_s=0",
    "checkpoint.async_save=false",
)


def server_pids(run_dir: Path) -> list[int]:
    """Return the HTTP processes of the run's servers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # the process has ended
            continue
        if b"rlhf.rollout.servers" in words and str(run_dir / "rollout_model").encode() in words:
            found.append(int(folder.name))
    return found


def until_step(run_dir: Path, step: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while not (run_dir / "metrics.jsonl").exists() or max(record["step"] for record in records(run_dir)) < step:
        assert time.monotonic() < end, f"the run has not logged step {step}"
        time.sleep(0.1)


def test_a_run_with_adapters_goes_on_after_kills_of_the_ranks_and_of_the_server(
    sums: Path, tmp_path: Path, launches: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM starts twice, for minutes each on a busy machine.
    monkeypatch.setattr(launching, "DEADLINE_S", DEADLINE_S)
    run_dir = tmp_path / "rlhf" / "adapted"
    kill = at("rollout.begin", KILLED, "SIGKILL", once=tmp_path / "hit", after_s=0.2)
    running = launches.submit(train, small(tmp_path, "adapted", sums, *SETTINGS), kill)
    until_step(run_dir, KILLED + 1)
    (pid,) = server_pids(run_dir)
    os.kill(pid, signal.SIGKILL)
    end = running.result(DEADLINE_S)
    assert end.code == 0, end.output
    assert (tmp_path / "hit").exists()
    assert end.output.count("Restart 1 of") == 1
    assert end.output.count("still runs and is used again") == 1

    history = [record for record in records(run_dir) if record["step"]]
    assert [record["step"] for record in history] == list(range(1, 9))
    # The tokens come from the adapters of their step, after every failure, too.
    assert max(record["rollout/logprob_diff_max"] for record in history) < 1e-3
    assert sum(record["perf/stale_answers"] for record in history) == 0
    # The server gets the base at the start and after its restart. All other syncs send adapters.
    assert sum(record["perf/server_restarts"] for record in history) == 1, end.output
    sizes = [record["perf/sync_bytes"] for record in history]
    with_base = [size for size in sizes if size > 10 * min(size for size in sizes if size)]
    assert sizes[0] in with_base
    assert len(with_base) == 2, sizes
