"""Runs with `rollout.async_steps=2` on two scripted servers, killed with responses in flight. A run without kills that
replays the journal ends with the killed run's bits, although its servers would give other responses."""

import shutil
from pathlib import Path

import pytest

from rlhf.experience.journal import FOLDER
from rlhf.storage.layout import scan
from tests.support.compare_runs import differences
from tests.support.kept_journal import at
from tests.support.launching import Ended, ranks, records, small
from tests.support.scripted_vllm import ScriptedVllm

STEPS, K = 6, 2
SETTINGS = (
    f"rollout.async_steps={K}",
    "rollout=vllm_server",
    "algorithm.rollout_correction.rollout_is=token",
    "reward.functions=[tests/support/graded.py:nearness]",
    "checkpoint.journal=true",
    "checkpoint.async_save=false",
    "data.max_response_length=32",
    f"trainer.total_training_steps={STEPS}",
)


def journaled(run_dir: Path) -> list[float]:
    """Return each step's share of samples from the journal. A step whose batch was already complete logs no share. For
    such a step, repeat the share of the step before."""
    steps = [record for record in records(run_dir) if record["step"]]
    before = 0.0
    return [before := record.get("perf/journal_samples", before) for record in steps]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_replay_of_the_journal_ends_with_the_bits_of_the_killed_run(nproc, sums, tmp_path: Path):
    run_dir, kept, killed = tmp_path / "rlhf" / "run", tmp_path / "kept", tmp_path / "killed"
    kept.mkdir()

    def start(longest: int, environment: dict[str, str]) -> Ended:
        """Start the run on new servers whose responses have up to `longest` tokens."""
        servers = [ScriptedVllm(0.1, longest) for _ in range(2)]
        urls = f"rollout.servers.urls=[{','.join(server.url for server in servers)}]"
        try:
            arguments = small(tmp_path, "run", sums, *SETTINGS, urls)
            return ranks(tmp_path / "log", arguments, environment, nproc)
        finally:
            for server in servers:
                server.close()

    # The kill is in the update of step 6. Step 3 is saved, and the journal has steps 4 to 6.
    kill = at(run_dir, kept, "update.mid", 11, "SIGKILL")
    assert start(32, kill).code == -9
    live = records(run_dir)
    assert [record["step"] for record in live if "sampling/partial_samples" in record] == [1, 2, 3, 4, 5]
    assert sum(record.get("sampling/partial_samples", 0) for record in live), "nothing was in flight"
    end = start(20, at(run_dir, kept))
    assert end.code == 0, end.output
    ages = [record["sampling/token_staleness_max"] for record in records(run_dir) if record["step"]]
    assert 1 <= max(ages) <= K
    assert journaled(run_dir) == [0, 0, 0, 1, 1, 1]

    # The replay begins again with the whole journal, and without checkpoints.
    shutil.move(run_dir, killed)
    shutil.copytree(killed, run_dir)
    for checkpoint in scan(run_dir):
        shutil.rmtree(checkpoint)
    for name in ("metrics.jsonl", "events.jsonl", "latest_checkpointed_iteration.txt"):
        (run_dir / name).unlink()
    shutil.copytree(kept, run_dir / FOLDER, dirs_exist_ok=True)
    end = start(9, at(run_dir, tmp_path))
    assert end.code == 0, end.output
    assert journaled(run_dir) == [1] * STEPS
    assert differences(killed, run_dir) == []
