"""Runs whose agent rewrites its history: a kill inside an episode changes no bit, and all rows are trained on."""

import json
from pathlib import Path

import pytest

from rlhf.errors import EXIT_DONE
from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import ROOT, ranks, records

PROGRAM = ROOT / "tests" / "support" / "chat_agent.py"
TOKEN_PROGRAM = ROOT / "tests" / "support" / "token_agent.py"
VARIANTS = {
    # The first checkpoint has groups that the second step uses.
    "grpo": (
        1,
        14,
        [
            "actor.ppo_mini_batch_size=2",
            "actor.ppo_epochs=2",
            "actor.shuffle=true",
            "data.gen_batch_size=6",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.on_limit=fill",
        ],
    ),
    "gae": (2, 4, ["algorithm.adv_estimator=gae", "actor.loss_agg_mode=seq-mean-token-mean", "actor.use_kl_loss=true"]),
    "tokens": (1, 4, [f"env.command=python {TOKEN_PROGRAM} rewrite"]),
}
"""Ranks, number of the round of turns with the kill, and settings."""


def train(folder: Path, name: str, variant: str, *more: str, environment: dict[str, str] | None = None) -> int:
    nproc, _, settings = VARIANTS[variant]
    (folder / "val.jsonl").write_text('{"prompt": "Guess.", "secret": 4}\n' * 2)
    arguments = [
        "recipes=env_guess",
        "env=none",
        f"env.command=python {PROGRAM} compact",
        "env.timeout_s=60",
        "env.max_turns=8",
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=3",
        "data.max_response_length=60",
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={name}",
        "trainer.device=cpu",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.test_freq=2",
        "trainer.val_before_train=false",
        "trainer.log_rollouts=-1",
        f"data.val_files={folder}/val.jsonl",
        *settings,
        *more,
    ]
    end = ranks(folder / "log", arguments, environment, nproc=nproc)
    (folder / "output").write_text(end.output)
    return end.code


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kill_inside_a_forked_episode_changes_no_bit(variant, tmp_path: Path):
    assert train(tmp_path, "whole", variant) == EXIT_DONE, (tmp_path / "output").read_text()
    kill = at("env.turn", VARIANTS[variant][1], "SIGKILL", once=tmp_path / "hit")
    journal = "checkpoint.journal=true"
    assert train(tmp_path, "killed", variant, journal, environment=kill) != EXIT_DONE
    assert (variant == "grpo") == (tmp_path / "rlhf" / "killed" / "global_step_1").exists()
    assert any(file.stat().st_size for file in (tmp_path / "rlhf" / "killed" / "journal").iterdir())
    assert train(tmp_path, "killed", variant, journal, environment=kill) == EXIT_DONE
    whole, killed = tmp_path / "rlhf" / "whole", tmp_path / "rlhf" / "killed"
    assert differences(whole, killed) == []
    for record in records(whole):
        if record["step"]:
            assert record["env/failed"] == 0
            assert record["env/rows"] > 1
            assert record["actor/grad_norm"] > 0
    if variant == "grpo":
        assert records(whole)[1]["sampling/groups_carried"] > 0
    samples = [json.loads(line) for line in (whole / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert len(samples) == 4 * 3
    for sample in samples:
        assert sum(who == "history" for who, _ in sample["parts"] or ()) == sample["rows"] - 1
