"""`python -m rlhf.train backend=deepspeed` as a user starts it: a killed rank does not change the run, and a run may
continue in another engine."""

import json
from pathlib import Path

import pytest

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.events import LISTENER_VARIABLE
from tests.support.compare_runs import differences
from tests.support.engines import NEEDS_DEEPSPEED
from tests.support.forked_start import train_forked
from tests.support.killer import PLAN_VARIABLE
from tests.support.launching import copy_run, records, saved_steps, small, train, write_sums
from tests.support.rounding import sum_bound

pytestmark = NEEDS_DEEPSPEED

PPO = ("algorithm=ppo", "actor.ppo_epochs=2", "critic.optim.lr=1e-3")
DAPO = ("algorithm=dapo", "data.gen_batch_size=12", "ref.update_freq=2", "model.enable_gradient_checkpointing=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "stage", "autocast", "algorithm"),
    [(2, 2, "none", PPO), (1, 3, "bfloat16", DAPO)],
    ids=["ppo_zero2", "dapo_zero3_bfloat16_on_one_rank"],
)
def test_a_run_with_a_killed_rank_ends_with_the_same_bits(tmp_path, nproc, stage, autocast, algorithm):
    sums = write_sums(tmp_path / "sums.jsonl")
    engine = ["backend=deepspeed", f"backend.zero_stage={stage}", f"backend.autocast={autocast}"]
    settings = [f"trainer.nproc={nproc}", *engine, *algorithm]
    calm = train_forked(small(tmp_path, "calm", sums, *settings))
    assert calm.code == 0, calm.output

    plan = tmp_path / "plan" / "kills.json"
    plan.parent.mkdir()
    plan.write_text(
        json.dumps([{"id": 0, "event": "update.mid", "observer": nproc - 1, "victim": "0", "after_step": 3}])
    )
    plan.with_name("run_dir").write_text(str(run_dir(tmp_path, "killed")))
    environment = {LISTENER_VARIABLE: "tests.support.killer:on_event", PLAN_VARIABLE: str(plan)}
    killed = train(small(tmp_path, "killed", sums, *settings), environment)
    assert killed.code == 0, killed.output
    assert plan.with_name("fired_0000").exists()
    assert differences(run_dir(tmp_path, "calm"), run_dir(tmp_path, "killed")) == []


def test_a_run_goes_on_in_another_engine(tmp_path):
    """The last of seven steps runs under FSDP2 on one rank instead of ZeRO 2 on two. Its metrics are almost those of
    the unchanged run."""
    sums = write_sums(tmp_path / "sums.jsonl")
    whole = train_forked(small(tmp_path, "whole", sums, "backend=deepspeed", "trainer.nproc=2"))
    assert whole.code == 0, whole.output
    runs = [run_dir(tmp_path, name) for name in ("whole", "changed")]
    copy_run(*runs, last_step=6)
    changed = train_forked(small(tmp_path, "changed", sums))
    assert changed.code == 0, changed.output
    assert [saved_steps(run)[0] for run in runs] == [7, 7]
    assert [read_manifest(run / "global_step_7").backend for run in runs] == ["deepspeed", "fsdp2"]
    last = [records(run)[-1] for run in runs]
    bound = sum_bound(last[0]["tokens/total"])  # a gradient is a sum of this many terms
    assert last[1]["actor/grad_norm"] == pytest.approx(last[0]["actor/grad_norm"], rel=bound)


def run_dir(folder: Path, name: str) -> Path:
    return folder / "rlhf" / name
