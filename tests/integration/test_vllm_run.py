"""vLLM in the ranks: a killed run ends with the undisturbed bits, and `rlhf.evaluate` has the run's results."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import STEPS, records, small, train

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
]
EPISODES = [
    "env.classes=[tests/support/logged_calls.py:Sums]",
    "env.max_turns=3",
    "data.max_response_length=32",
    "checkpoint.journal=true",
]
SETTINGS = {
    # Evaluates between saves: the samples of an evaluation must not change the step after it.
    "one rank": ["trainer.test_freq=2"],
    "two ranks": ["trainer.nproc=2"],
    "episodes": EPISODES,
    # With servers, the run has the journal's samples.
    "episodes over a server": [
        *EPISODES,
        "rollout=vllm_server",
        "rollout.servers.count=1",
        "rollout.engine_kwargs.vllm={kv_cache_memory_bytes: 67108864}",
    ],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_killed_run_ends_as_one_that_was_not(name, sums, tmp_path: Path, launches: ThreadPoolExecutor):
    def command(experiment: str) -> list[str]:
        settings = ["rollout=vllm", *SETTINGS[name], "checkpoint.async_save=false", "trainer.restart_backoff_s=0"]
        return small(tmp_path, experiment, sums, f"data.val_files={sums}", *settings)

    undisturbed = launches.submit(train, command("undisturbed"))
    # The kill is in step 5, after the save of step 3.
    killed = launches.submit(train, command("killed"), at("rollout.after", 5, "SIGKILL", once=tmp_path / "hit"))
    for end in (undisturbed.result(), killed.result()):
        assert end.code == 0, end.output
    assert (tmp_path / "hit").exists()
    runs = tmp_path / "rlhf"
    assert differences(runs / "undisturbed", runs / "killed") == []
    # The folder has the same name at each start, because vLLM's compile cache depends on the name.
    assert (runs / "killed" / "rollout_model" / "config.json").exists()
    history = records(runs / "killed")
    assert ("env/turns" in history[1]) == name.startswith("episodes")
    assert [record["step"] for record in history] == list(range(STEPS + 1))
    assert max(record["rollout/logprob_diff_max"] for record in history[1:]) < 1e-3


def test_an_evaluation_has_the_bits_of_the_run_also_after_a_kill(sums, tmp_path: Path):
    """The evaluation runs on two ranks, with the stored settings of the run."""
    sampled = ["rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1.0", "trainer.total_training_steps=2"]
    command = small(tmp_path, "run", sums, f"data.val_files={sums}", "rollout=vllm", "trainer.nproc=2", *sampled)
    end = train(command)
    assert end.code == 0, end.output
    run = tmp_path / "rlhf" / "run"
    killed = train([str(run)], at("evaluation.before", 1, "SIGKILL", to="supervisor"), module="rlhf.evaluate")
    assert killed.code == -9, killed.output
    end = train([str(run), "--json"], module="rlhf.evaluate")
    assert end.code == 0, end.output
    (result,) = [json.loads(path.read_text())["result"] for path in tmp_path.rglob("evaluation.json")]
    in_run = {name: value for name, value in records(run)[-1].items() if name.startswith("val")}
    assert {name: value for name, value in result["metrics"].items() if name.startswith("val")} == in_run
    assert result["step"] == 2
