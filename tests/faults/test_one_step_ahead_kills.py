"""Runs that generate one step ahead, killed with a batch in flight, end with the bits of an undisturbed run."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import EXIT_REQUEUE
from tests.support.background_run import at
from tests.support.compare_runs import differences
from tests.support.launching import STEPS, Ended, ranks, records, small
from tests.support.undisturbed import EXPORT, once, session_folder

AHEAD = (
    "rollout=vllm_server",
    # Remote servers need no vLLM on this machine. The tests replace the engine anyway.
    "rollout.servers.urls=[http://127.0.0.1:9]",
    "rollout.async_steps=1",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.test_freq=2",
    EXPORT,
)
RUNS: dict[str, tuple[str, ...]] = {
    "every prompt": (),
    "dynamic sampling": ("algorithm.filter_groups.enable=true", "data.gen_batch_size=12"),
    "rollbacks": ("guards.action=rollback", "guards.max_reward_drop=0.15", "guards.max_events=100"),
}
# Two mini-batches per step, saves every three steps. Kills come before the first save, after it, and after a save that
# waited for the running batch. A stop request saves at any step.
KILLS: dict[str, tuple[dict[str, Any], int]] = {
    "before a save": ({"event": "update.mid", "number": 3, "what": "SIGKILL"}, -9),
    "after a save": ({"event": "update.mid", "number": 9, "what": "SIGKILL"}, -9),
    "in a save": ({"event": "commit.rename", "number": 1, "what": "SIGKILL"}, -9),
    "asked to stop": ({"event": "update.mid", "number": 9, "what": "SIGTERM"}, EXIT_REQUEUE),
}


@pytest.mark.parametrize(
    ("run", "kill", "nproc"),
    [
        ("every prompt", "before a save", 1),
        pytest.param("every prompt", "after a save", 2, marks=pytest.mark.slow),
        pytest.param("every prompt", "asked to stop", 1, marks=pytest.mark.slow),
        pytest.param("dynamic sampling", "in a save", 1, marks=pytest.mark.slow),
        ("dynamic sampling", "after a save", 2),
        ("rollbacks", "after a save", 1),
    ],
)
def test_a_kill_with_a_batch_in_flight_costs_no_bit(run, kill, nproc, sums, tmp_path: Path, tmp_path_factory):
    shared = session_folder(tmp_path_factory)

    def start(folder: Path, name: str, environment: dict[str, str], *more: str) -> Ended:
        arguments = small(folder, name, sums, *AHEAD, f"data.val_files={sums}", *RUNS[run], *more)
        return ranks(tmp_path / "log", arguments, environment, nproc)

    name = f"{run} ahead on {nproc}".replace(" ", "_")
    end = once(shared, name, lambda: start(shared, name, at()))
    assert end.code == 0, end.output
    undisturbed, killed = shared / "rlhf" / name, tmp_path / "rlhf" / "killed"
    ages = [record["sampling/staleness_max"] for record in records(undisturbed)[1:]]
    if run == "every prompt":
        assert ages == [0] + [1] * (STEPS - 1)
    interruption, code = KILLS[kill]
    kills = at(**interruption, once=tmp_path / "hit")
    # Synchronous saves, so that the killed run's checkpoints are known.
    assert start(tmp_path, "killed", kills, "checkpoint.async_save=false").code == code
    end = start(tmp_path, "killed", kills)
    assert end.code == 0, end.output
    assert differences(undisturbed, killed) == []
    if run == "rollbacks":
        assert records(undisturbed)[-1]["guards/rollbacks"] > 0
