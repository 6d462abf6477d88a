"""Second starts of a run: they continue, end with an error, fall back, fork, or start anew."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.ranks.lock import run_lock
from rlhf.storage.layout import DRIVER_STATE, scan
from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import TINY_POLICY, Ended, copy_run, flip_a_byte, ranks, records, saved_steps, small
from tests.support.undisturbed import EXPORT, Undisturbed
from tests.support.verified import verify


class Case:
    """Copies the undisturbed run on one rank, cut back to an earlier step, and starts the copy again."""

    def __init__(self, folder: Path, undisturbed: Undisturbed, sums: Path):
        self.folder, self.sums, self.finished = folder, sums, undisturbed.run_dir(1)
        self.run_dir = folder / "rlhf" / "again"

    def cut_back(self, step: int) -> None:
        copy_run(self.finished, self.run_dir, step)

    def start(self, *overrides: str, **interruption) -> Ended:
        return ranks(self.folder / "log", [*small(self.folder, "again", self.sums), EXPORT, *overrides], **interruption)


@pytest.fixture
def case(tmp_path, undisturbed, sums) -> Case:
    return Case(tmp_path, undisturbed, sums)


def test_harmless_changes_are_logged_and_do_not_change_the_run(case):
    case.cut_back(3)
    end = case.start("checkpoint.max_to_keep=5", "trainer.preempt_grace_s=77")
    assert end.code == EXIT_DONE, end.output
    assert "checkpoint.max_to_keep: 3 in the checkpoint, 5 now" in end.output
    assert "trainer.preempt_grace_s: 300.0 in the checkpoint, 77.0 now" in end.output
    assert differences(case.finished, case.run_dir) == []


def test_changes_that_give_another_run_are_refused_until_allowed(case):
    # Promise 13.
    case.cut_back(3)
    changes = ("actor.optim.lr=1e-3", "rollout.temperature=0.9")
    before = (case.run_dir / "metrics.jsonl").read_bytes()
    end = case.start(*changes)
    assert end.code == EXIT_USER_ERROR
    assert "actor.optim.lr: 0.0002 in the checkpoint, 0.001 now" in end.output
    assert "rollout.temperature: 1.0 in the checkpoint, 0.9 now" in end.output
    assert "trainer.allow_config_change=true" in end.output
    assert "Traceback" not in end.output
    assert (case.run_dir / "metrics.jsonl").read_bytes() == before
    assert saved_steps(case.run_dir) == [3]
    end = case.start(*changes, "trainer.allow_config_change=true")
    assert end.code == EXIT_DONE, end.output
    assert "changed setting that affects the run's numbers: actor.optim.lr" in end.output
    assert [record["step"] for record in records(case.run_dir)] == list(range(1, 8))


def test_other_model_files_are_refused_and_another_architecture_cannot_be_forced(case):
    case.cut_back(3)
    folder = case.folder / "model"
    shutil.copytree(TINY_POLICY, folder)
    (folder / "generation_config.json").write_text("{}")
    end = case.start(f"model.path={folder}")
    assert end.code == EXIT_USER_ERROR
    assert f"model.path={folder} holds other files than when" in end.output
    config = LlamaConfig.from_pretrained(TINY_POLICY, num_hidden_layers=1)
    LlamaForCausalLM(config).save_pretrained(folder)
    end = case.start(f"model.path={folder}", "trainer.allow_config_change=true")
    assert end.code == EXIT_USER_ERROR
    assert "do not fit the architecture of model.path" in end.output
    assert "Traceback" not in end.output
    assert saved_steps(case.run_dir) == [3]


def test_other_prompts_are_refused(case):
    # Promise 13.
    case.cut_back(3)
    shorter = case.folder / "shorter.jsonl"
    shorter.write_text("".join(case.sums.read_text().splitlines(keepends=True)[:-1]))
    # The file has other content. Another path with the same content would be allowed.
    end = case.start(f"data.train_files={shorter}")
    assert end.code == EXIT_USER_ERROR
    assert f"data.train_files: {case.sums} in the checkpoint, {shorter} now" in end.output


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_result_is_the_same(case):
    case.cut_back(6)
    flip_a_byte(next((case.run_dir / "global_step_6" / "actor" / "optimizer").glob("*.safetensors")))
    end = case.start()
    assert end.code == EXIT_DONE, end.output
    assert "It was set aside as global_step_6.damaged-" in end.output
    assert len(list(case.run_dir.glob("global_step_6.damaged-*"))) == 1
    assert differences(case.finished, case.run_dir) == []


def test_a_run_with_only_damaged_checkpoints_does_not_start_at_step_0(case):
    # Promise 5.
    case.cut_back(6)
    for path in scan(case.run_dir):
        flip_a_byte(path / DRIVER_STATE)
    for _ in range(2):
        end = case.start()
        assert end.code == EXIT_USER_ERROR
        assert f"Every checkpoint in {case.run_dir} is damaged" in end.output
        assert "trainer.overwrite=true" in end.output
    assert [record["step"] for record in records(case.run_dir)] == list(range(1, 8))


def test_disable_refuses_and_overwrite_begins_anew(case):
    case.cut_back(6)
    old = json.loads((case.run_dir / "run.json").read_text())["run_id"]
    end = case.start("trainer.resume_mode=disable")
    assert end.code == EXIT_USER_ERROR
    assert "trainer.resume_mode=disable, but" in end.output
    assert "holds checkpoints up to step 6" in end.output
    assert saved_steps(case.run_dir) == [6, 3]
    (case.run_dir / "global_step_999").mkdir()
    end = case.start("trainer.overwrite=true")
    assert end.code == EXIT_DONE, end.output
    assert json.loads((case.run_dir / "run.json").read_text())["run_id"] != old
    assert differences(case.finished, case.run_dir) == []


def test_a_fork_starts_from_another_run_once_and_then_continues_its_own(case):
    source = case.finished / "global_step_3"
    # Synchronous saves are committed before the kill.
    saves = ("trainer.save_freq=1", "checkpoint.async_save=false")
    fork = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}", *saves)
    # Steps 4 and 5 are saved, the kill is in step 6.
    end = case.start(*fork, environment=at("update.before", 3, "SIGKILL"))
    assert end.code == -9, end.output
    assert saved_steps(case.run_dir) == [5, 4]
    end = case.start(*fork)
    assert end.code == EXIT_DONE, end.output
    assert [record["step"] for record in records(case.run_dir)] == [4, 5, 6, 7]
    ours, theirs = verify(case.run_dir / "global_step_7").files, verify(case.finished / "global_step_7").files
    for name in ours.keys() - {DRIVER_STATE, "config.yaml"}:
        assert ours[name] == theirs[name], name


def test_a_rank_that_is_asked_to_stop_without_a_supervisor_saves_and_asks_to_be_requeued(case):
    end = case.start(environment=at("update.before", 2, "SIGTERM"))
    assert end.code == EXIT_REQUEUE
    assert saved_steps(case.run_dir) == [2]


def test_a_second_run_is_refused_while_the_first_lives(case):
    # Promise 12.
    case.run_dir.mkdir(parents=True)
    with run_lock(case.run_dir):
        end = case.start()
    assert end.code == EXIT_USER_ERROR
    assert f"Another run is writing into {case.run_dir}: process" in end.output
    assert saved_steps(case.run_dir) == []
