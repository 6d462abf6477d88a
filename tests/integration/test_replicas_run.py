"""Runs on two ranks, as a user starts them: replicas by the memory plan, kills and resumes, and older checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.config.library import Library
from rlhf.evaluate.target_settings import plan
from rlhf.evaluate.targets import find_target
from rlhf.events import LISTENER_VARIABLE
from rlhf.storage.layout import CONFIG, scan
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.killer import PLAN_VARIABLE
from tests.support.launching import copy_run, small, train, write_sums

pytestmark = pytest.mark.slow
TWO = "trainer.nproc=2"
SHARDS = "backend.dp_replicate=1"


def run_dir(folder: Path, name: str) -> Path:
    return folder / "rlhf" / name


def replicas_of(run: Path) -> Any:
    return yaml.safe_load((scan(run)[0] / CONFIG).read_text())["backend"]["dp_replicate"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def sums(folder) -> Path:
    return write_sums(folder / "sums.jsonl")


@pytest.fixture(scope="module")
def calm(folder, sums) -> str:
    """The output of an undisturbed run with replicas."""
    done = train_forked(small(folder, "calm", sums, TWO))
    assert done.code == 0, done.output
    return done.output


def test_the_memory_plan_chooses_replicas_and_logs_them(folder, calm):
    assert "backend.dp_replicate=2 on 2 ranks, by the memory plan" in calm
    assert calm.count("Each rank trains a whole replica of the model without FSDP2") == 1
    assert replicas_of(run_dir(folder, "calm")) == 2


def test_a_run_with_a_killed_rank_ends_with_the_same_bits(folder, sums, calm):
    kills = folder / "plan" / "kills.json"
    kills.parent.mkdir()
    kills.write_text(json.dumps([{"id": 0, "event": "update.mid", "observer": 1, "victim": "0", "after_step": 4}]))
    kills.with_name("run_dir").write_text(str(run_dir(folder, "killed")))
    environment = {LISTENER_VARIABLE: "tests.support.killer:on_event", PLAN_VARIABLE: str(kills)}
    killed = train(small(folder, "killed", sums, TWO), environment)
    assert killed.code == 0, killed.output
    assert kills.with_name("fired_0000").exists()
    assert "backend.dp_replicate=2 on 2 ranks, as in the checkpoint" in killed.output
    assert differences(run_dir(folder, "calm"), run_dir(folder, "killed")) == []


def test_an_evaluation_may_have_other_ranks(folder, sums, calm):
    settings = [f"data.val_files={sums}", "trainer.nproc=1"]
    (planned,) = plan([find_target(str(run_dir(folder, "calm")))], settings, Library.find(None))
    assert (planned.config.trainer.nproc, planned.config.backend.dp_replicate) == (1, None)


def test_a_run_that_began_with_shards_keeps_them(folder, sums):
    """Like a run of a release without replicas, whose checkpoints all have `dp_replicate=1`."""
    whole = train_forked(small(folder, "shards", sums, TWO, SHARDS))
    assert whole.code == 0, whole.output
    runs = [run_dir(folder, name) for name in ("shards", "later")]
    copy_run(*runs, last_step=6)
    later = train_forked(small(folder, "later", sums, TWO))
    assert later.code == 0, later.output
    assert "backend.dp_replicate=1 on 2 ranks, as in the checkpoint" in later.output
    assert differences(*runs) == []


def test_a_run_goes_on_with_shards_on_one_rank_and_with_replicas_again(folder, sums, calm):
    copy_run(run_dir(folder, "calm"), run_dir(folder, "crossing"), last_step=3)
    for steps, settings in ((4, (TWO, SHARDS)), (5, ()), (7, (TWO,))):
        length = f"trainer.total_training_steps={steps}"
        done = train_forked(
            small(
                folder, "crossing", sums, *settings, length, "trainer.allow_config_change=true", "trainer.save_freq=1"
            )
        )
        assert done.code == 0, done.output
    assert "backend.dp_replicate=2 on 2 ranks, by the memory plan" in done.output
