import datetime
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.checkpoint.commit.publication import begin
from rlhf.checkpoint.start import preparation
from rlhf.checkpoint.start import run_dir as directory
from rlhf.checkpoint.start.run_dir import planned_steps, resume_source
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.ranks.parent import LAUNCH
from rlhf.ranks.run_events import read_events, record_event
from rlhf.storage.layout import EVENTS, HISTORY, POINTER, scan, step_dir, step_of
from rlhf.tracking import History, write_report
from tests.support.checkpoints import (
    PlainRole,
    flip_bit,
    make_checkpointer,
    make_config,
    make_driver,
    resume,
    save_steps,
)
from tests.support.refusals import says
from tests.support.sections import finished_step, prepare
from tests.support.small_disks import small_disk
from tests.support.thread_ranks import make_coordinator, run_thread_ranks, this_rank


@pytest.fixture
def config(tmp_path) -> Config:
    return make_config(tmp_path)


def steps(config: Config) -> list[int | None]:
    return [step_of(path) for path in scan(config.run_dir)]


def names(config: Config) -> set[str]:
    return {path.name for path in config.run_dir.iterdir()}


def test_a_new_directory_is_made_and_its_run_id_stays(config):
    prepare(config)
    first = read_run_file(config.run_dir)
    assert len(first["run_id"]) == 12
    prepare(config)
    assert read_run_file(config.run_dir) == first
    assert names(config) == {"run.json"}


def test_a_lost_run_file_is_restored_from_the_newest_intact_checkpoint(config):
    save_steps(config, PlainRole(), 2)
    prepare(config)
    assert read_run_file(config.run_dir)["run_id"] == "r"
    (config.run_dir / "run.json").unlink()
    flip_bit(step_dir(config.run_dir, 2) / "driver_state.json", 40)
    prepare(config)
    assert len(read_run_file(config.run_dir)["run_id"]) == 12


def test_leftovers_of_kills_are_removed_and_other_files_kept(config, caplog):
    save_steps(config, PlainRole(), 2, 4)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    before = names(config)
    temporary = begin(config.run_dir, 6)
    (temporary / "half").write_text("x")
    (config.run_dir / ".tmp-metrics.jsonl").touch()
    with caplog.at_level(logging.INFO, logger="rlhf"):
        prepare(config)
    assert names(config) == before | {"run.json"}
    assert steps(config) == [4, 2]
    assert temporary.name in caplog.text


def test_leftovers_that_cannot_be_deleted_stop_no_start(config, caplog):
    """EBUSY, as over a mount or NFS's silly renames, once ended every start until the restarts were used up."""
    # Promise 11.
    save_steps(config, PlainRole(), 2, 4)
    trash = [config.run_dir / name for name in (".trash-a", ".trash-b", ".trash-c")]
    for folder in trash:
        folder.mkdir()
    with small_disk(trash[1] / "busy", 1):
        prepare(config)
        assert [folder.exists() for folder in trash] == [False, True, False]
        assert steps(config) == [4, 2]
        assert f"{trash[1]} could not be removed" in caplog.text
    prepare(config)
    assert not trash[1].exists()


def test_overwrite_empties_the_directory_but_for_the_locks(config, tmp_path, caplog):
    save_steps(config, PlainRole(), 2, 4)
    prepare(config)
    old_id = read_run_file(config.run_dir)["run_id"]
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    for name in ("run.lock", "ranks.lock", "metrics.jsonl"):
        (config.run_dir / name).write_text("x")
    (config.run_dir / "report").mkdir()
    (config.run_dir / "link").symlink_to(outside)
    (config.run_dir / "global_step_9").symlink_to(outside)
    begin(config.run_dir, 6)
    config.trainer.overwrite = True
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        prepare(config)
    assert names(config) == {"run.lock", "ranks.lock", "run.json"}
    assert read_run_file(config.run_dir)["run_id"] != old_id
    assert (outside / "precious").exists()
    assert "trainer.overwrite=true: deleting the checkpoints up to step 9" in caplog.text


def test_overwrite_removes_the_pointer_before_what_it_names(config, monkeypatch):
    save_steps(config, PlainRole(), 2)
    seen = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *a: (seen.append((config.run_dir / POINTER).exists()), rename(*a)))
    config.trainer.overwrite = True
    prepare(config)
    assert seen
    assert not any(seen)


def start_by_agents(rank: int, config: Config, agents: list[str]) -> list[int | None]:
    """Start under the torchrun processes `agents`, which have one rank each; return the steps that are left."""
    coordinator = make_coordinator()
    prepare(config, coordinator)
    return coordinator.on_leader(lambda: steps(config))


@pytest.mark.parametrize("mode", ["overwrite", "disable"])
def test_a_launch_of_torchrun_knows_its_own_saves_while_machines_come_and_go(config, monkeypatch, mode):
    """torchrun's restart count stays 0 if machines come and go. Such a change once deleted or rejected own saves."""
    config.checkpoint.max_to_keep = None
    if mode == "overwrite":
        save_steps(config, PlainRole(), 1)
    config.trainer.overwrite = mode == "overwrite"
    config.trainer.resume_mode = "disable" if mode == "disable" else "auto"
    expected: list[int | None] = []
    # The same two agents start again, then one leaves, one joins, the last of the first two leaves, and one joins.
    for number, agents in enumerate((["a", "b"], ["a", "b"], ["b"], ["b", "c"], ["c"], ["d", "c"]), start=2):
        monkeypatch.setattr(preparation, "torchrun_agent", lambda agents=agents: agents[this_rank() or 0])
        assert run_thread_ranks(len(agents), start_by_agents, config, agents) == [expected] * len(agents)
        save_steps(config, PlainRole(), number)
        expected = [number, *expected]
    monkeypatch.setattr(preparation, "torchrun_agent", lambda: "e")
    if mode == "overwrite":  # the same command again, on purpose
        prepare(config)
        assert steps(config) == []
    else:
        with pytest.raises(UserError, match=r"trainer\.resume_mode=disable"):
            prepare(config)
        assert steps(config) == expected


@pytest.mark.parametrize("mode", ["overwrite", "disable"])
def test_all_attempts_of_a_schedulers_job_are_one_launch(config, monkeypatch, mode):
    config.trainer.overwrite = mode == "overwrite"
    config.trainer.resume_mode = "disable" if mode == "disable" else "auto"
    monkeypatch.setenv(LAUNCH, "slurm-7")
    prepare(config)
    save_steps(config, PlainRole(), 2)
    prepare(config)
    assert steps(config) == [2]
    monkeypatch.setenv(LAUNCH, "slurm-8")
    if mode == "overwrite":
        prepare(config)
        assert steps(config) == []
    else:
        with pytest.raises(UserError, match=r"trainer\.resume_mode=disable"):
            prepare(config)


def test_the_start_date_stays_and_survives_a_lost_run_file(config, tmp_path):
    prepare(config)
    path = config.run_dir / "run.json"
    assert read_run_file(config.run_dir)["started_on"] == datetime.date.today().isoformat()
    for day in ("2026-03-14", "2026-03-15"):
        path.write_text(json.dumps({"run_id": "r", "started_on": day}))
        prepare(config)
        assert read_run_file(config.run_dir)["started_on"] == day
    save_steps(config, PlainRole(), 2, started_on="2026-03-16")
    path.unlink()
    prepare(config)
    assert read_run_file(config.run_dir) == {"run_id": "r", "started_on": "2026-03-16"}
    other = make_config(tmp_path / "other")
    fork(other, step_dir(config.run_dir, 2))
    prepare(other)
    assert read_run_file(other.run_dir)["started_on"] == "2026-03-16"


def test_a_run_whose_checkpoints_are_gone_does_not_start_again(config, tmp_path):
    prepare(config)
    save_steps(config, PlainRole(), 6)
    History(config.run_dir / HISTORY).append({"step": 6})
    shutil.move(step_dir(config.run_dir, 6), tmp_path / "kept")
    for start in (lambda: prepare(config), lambda: resume(config, PlainRole()), lambda: prepare(config)):
        with pytest.raises(UserError) as caught:
            start()
        says(caught.value, POINTER, "step 6", "no checkpoint", "Restore", "trainer.overwrite=true")
    assert [record["step"] for record in History(config.run_dir / HISTORY).records()] == [6]
    shutil.copytree(tmp_path / "kept", step_dir(config.run_dir, 6))
    prepare(config)
    assert resume(config, PlainRole()) == 6
    shutil.rmtree(step_dir(config.run_dir, 6))
    config.trainer.overwrite = True
    prepare(config)
    assert resume(config, PlainRole()) is None


def test_a_run_whose_checkpoints_and_pointer_are_gone_does_not_start_again(config):
    """A copy of a run without its checkpoints once started silently at step 0."""
    prepare(config)
    record_event(config.run_dir, "started")
    prepare(config)  # no save yet
    save_steps(config, PlainRole(), 4, 6)
    record_event(config.run_dir, "resumed", step=4)
    for name in ("global_step_4", "global_step_6"):
        shutil.rmtree(config.run_dir / name)
    (config.run_dir / POINTER).unlink()
    for start in (lambda: prepare(config), lambda: resume(config, PlainRole())):
        with pytest.raises(UserError) as caught:
            start()
        says(caught.value, EVENTS, "step 6", "no checkpoint", "Restore", "trainer.overwrite=true")
    config.trainer.overwrite = True
    prepare(config)
    config.trainer.overwrite = False
    prepare(config)
    assert resume(config, PlainRole()) is None


def test_a_fork_whose_own_checkpoints_are_damaged_begins_again_at_each_start(config, tmp_path):
    other = make_config(tmp_path / "other")
    save_steps(other, PlainRole(), 3)
    fork(config, step_dir(other.run_dir, 3))
    prepare(config)
    save_steps(config, PlainRole(), 7)
    flip_bit(step_dir(config.run_dir, 7) / "config.yaml", 11)
    for _ in range(2):
        prepare(config)
        assert resume(config, PlainRole()) == 3
    assert read_events(config.run_dir)[0].kind == "saved"


def test_a_fork_takes_the_place_of_a_run_whose_checkpoints_are_gone(config, tmp_path):
    prepare(config)
    save_steps(config, PlainRole(), 6)
    shutil.move(step_dir(config.run_dir, 6), tmp_path / "global_step_6")
    fork(config, tmp_path / "global_step_6")
    prepare(config)
    assert not (config.run_dir / POINTER).exists()


def test_a_fork_without_a_save_of_its_own_needs_its_source(config, tmp_path):
    """Without the resume settings, the command trained from step 0 with the fork's run id."""
    other = make_config(tmp_path / "other")
    save_steps(other, PlainRole(), 3)
    source = step_dir(other.run_dir, 3)
    fork(config, source)
    prepare(config)
    config.trainer.resume_mode, config.trainer.resume_from_path = "auto", None
    with pytest.raises(UserError, match=rf"began at {source} .*trainer\.resume_from_path={source}"):
        prepare(config)
    config.trainer.overwrite = True
    prepare(config)
    config.trainer.overwrite = False
    prepare(config)
    fork(config, source)
    prepare(config)
    save_steps(config, PlainRole(), 5)
    config.trainer.resume_mode, config.trainer.resume_from_path = "auto", None
    prepare(config)
    assert resume(config, PlainRole()) == 5


def test_a_run_file_with_an_invalid_date_is_damaged(config):
    prepare(config)
    (config.run_dir / "run.json").write_text('{"run_id": "r", "started_on": "tomorrow"}')
    with pytest.raises(UserError) as caught:
        prepare(config)
    says(caught.value, "run.json", "damaged", "started_on")


def test_without_torchrun_each_start_overwrites(config):
    config.trainer.overwrite = True
    for _ in range(2):
        prepare(config)
        assert set(read_run_file(config.run_dir)) == {"run_id", "started_on"}
        save_steps(config, PlainRole(), 2)
    prepare(config)
    assert steps(config) == []


def test_disable_refuses_checkpoints_and_names_three_remedies(config):
    config.trainer.resume_mode = "disable"
    prepare(config)
    save_steps(config, PlainRole(), 2, 4)
    with pytest.raises(UserError) as caught:
        prepare(config)
    for part in ("resume_mode=disable", "up to step 4", "overwrite=true", "experiment_name", "resume_mode=auto"):
        assert part in str(caught.value)
    assert steps(config) == [4, 2]
    config.trainer.overwrite = True
    prepare(config)
    assert steps(config) == []


def fork(config: Config, source) -> None:
    config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(source)


def test_fork_from_another_run_sets_own_checkpoints_aside_once(config, tmp_path):
    other = make_config(tmp_path / "other")
    save_steps(other, PlainRole(), 3)
    save_steps(config, PlainRole(), 2, 4)
    prepare(config)
    before = read_run_file(config.run_dir)
    source = step_dir(other.run_dir, 3)
    fork(config, source)
    prepare(config)
    assert steps(config) == []
    assert {"global_step_2.superseded-1", "global_step_4.superseded-1"} < names(config)
    assert resume_source(config.trainer) == source
    run = read_run_file(config.run_dir)
    assert run["resumed_from"] == str(source)
    assert run["run_id"] != before["run_id"]
    # The second start of the same command keeps what the forked run has saved, even when the source is gone by then.
    save_steps(config, PlainRole(), 5)
    other.run_dir.rename(tmp_path / "gone")
    prepare(config)
    assert steps(config) == [5]
    assert read_run_file(config.run_dir) == run
    assert steps(other) == []


@pytest.mark.parametrize("detour", ["plain", "dots", "link"])
def test_fork_from_an_own_step_keeps_it_and_what_is_older(config, tmp_path, detour):
    config.checkpoint.max_to_keep = None
    save_steps(config, PlainRole(), 2, 4, 6, 8)
    (tmp_path / "linked").symlink_to(config.run_dir)
    folder = {
        "plain": config.run_dir,
        "dots": config.run_dir.parent / "default" / ".." / "default",
        "link": tmp_path / "linked",
    }[detour]
    fork(config, step_dir(folder, 4))
    prepare(config)
    assert steps(config) == [4, 2]
    assert (config.run_dir / POINTER).read_text() == "4\n"
    save_steps(config, PlainRole(), 6)
    prepare(config)
    assert steps(config) == [6, 4, 2]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_fork_has_a_history_of_its_own(config, tmp_path, elsewhere):
    config.checkpoint.max_to_keep = None
    other = make_config(tmp_path / "other")
    save_steps(other, PlainRole(), 4)
    save_steps(config, PlainRole(), 2, 4, 6)
    prepare(config)
    history = History(config.run_dir / HISTORY)
    for step in range(7):
        history.append({"step": step, "val/accuracy": 1.0, "timing_s/step": 1.0})
    (config.run_dir / "tensorboard").mkdir()
    write_report(config.run_dir)
    whole = history.path.read_bytes()
    fork(config, step_dir(other.run_dir if elsewhere else config.run_dir, 4))
    prepare(config)
    for step in range(5, 7):
        history.append({"step": step, "reward/mean": 0.5, "timing_s/step": 2.0})
    prepare(config)
    text = write_report(config.run_dir)
    assert "5 to 6 in 4 s" in text
    assert "before" not in text
    # The records of the previous run are kept beside the new ones.
    assert (config.run_dir / f"{HISTORY}.superseded-1").read_bytes() == whole
    assert {"tensorboard.superseded-1", "report.superseded-1"} < names(config)


def test_a_start_completes_a_fork_that_was_killed(config, tmp_path):
    save_steps(config, PlainRole(), 2, 4, 6)
    prepare(config)
    (config.run_dir / "global_step_6").rename(config.run_dir / "global_step_6.superseded-1")
    fork(config, step_dir(config.run_dir, 2))
    prepare(config)
    assert steps(config) == [2]
    assert {"global_step_6.superseded-1", "global_step_4.superseded-1"} < names(config)


@pytest.mark.parametrize("name", ["nothing/global_step_3", "checkpoints", "global_step_3"])
def test_fork_from_a_path_without_checkpoint_is_rejected_and_changes_nothing(config, tmp_path, name):
    save_steps(config, PlainRole(), 2)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "global_step_3").write_text("a file")
    fork(config, tmp_path / name)
    with pytest.raises(UserError, match=r"trainer\.resume_from_path=.*name a global_step_N directory"):
        prepare(config)
    assert steps(config) == [2]


def test_the_forked_run_resumes_from_the_source_and_then_from_its_own(config, tmp_path):
    other = make_config(tmp_path / "other")
    save_steps(other, PlainRole(seed=3), 3)
    save_steps(config, PlainRole(seed=5), 5)
    fork(config, step_dir(other.run_dir, 3))
    prepare(config)
    role = PlainRole()
    assert resume(config, role) == 3
    assert role.position == 3
    save_steps(config, PlainRole(seed=7), 7)
    prepare(config)
    assert resume(config, role) == 7
    assert role.position == 7
    # All checkpoints of the fork are damaged: the source is the newest intact state, and nothing starts at step 0.
    (step_dir(config.run_dir, 7) / "manifest.json").unlink()
    assert resume(config, role) == 3
    assert "global_step_7.damaged-1" in names(config)


def test_a_damaged_fork_source_is_a_user_error(config, tmp_path):
    other = make_config(tmp_path / "other")
    save_steps(other, PlainRole(), 3)
    flip_bit(step_dir(other.run_dir, 3) / "config.yaml", 11)
    fork(config, step_dir(other.run_dir, 3))
    prepare(config)
    with pytest.raises(
        UserError, match=r"trainer\.resume_from_path .*config\.yaml: content differs.*another checkpoint"
    ):
        make_checkpointer(config, PlainRole()).resume()
    assert steps(other) == [3]  # another run's directory is not ours to tidy


def test_finished_step(config, caplog):
    assert finished_step(config) is None
    save_steps(config, PlainRole(), 8)
    assert finished_step(config) is None
    save_steps(config, PlainRole(), 10)
    assert finished_step(config) == 10
    config.trainer.total_training_steps = 11
    assert finished_step(config) is None
    config.trainer.total_training_steps, config.trainer.total_epochs = None, 2
    assert finished_step(config) == 10  # two epochs of the stored five steps
    config.trainer.total_epochs = 3
    assert finished_step(config) is None


def test_a_run_whose_prompts_are_used_up_is_finished_before_its_planned_steps(config):
    config.trainer.total_training_steps, config.trainer.total_epochs = None, 2  # ten steps at most
    for step, epochs in ((6, 1.99), (7, 2.0)):
        driver = make_driver(step)
        driver.epochs = epochs
        assert make_checkpointer(config, PlainRole(), driver=driver).save(step) is not None
        assert finished_step(config) == (None if epochs < 2 else 7)
    config.trainer.total_epochs = 3
    assert finished_step(config) is None
    config.trainer.total_training_steps = 8
    assert finished_step(config) is None


@pytest.mark.parametrize("name", ["manifest.json", "driver_state.json", "actor/model/rank_00000.safetensors"])
def test_a_damaged_last_checkpoint_is_not_finished_and_is_left_for_the_ranks_to_report(config, name):
    save_steps(config, PlainRole(), 8, 10)
    path = step_dir(config.run_dir, 10) / name
    flip_bit(path, 8 * path.stat().st_size - 9)
    assert finished_step(config) is None
    assert steps(config) == [10, 8]


def test_planned_steps():
    config = Config()
    config.trainer.total_training_steps, config.trainer.total_epochs = None, 3
    assert planned_steps(config.trainer, 2.5) == 7
    assert planned_steps(config.trainer, 0.1) == 1
    config.trainer.total_training_steps = 5
    assert planned_steps(config.trainer, 2.5) == 5


def test_the_run_file_is_plain_json(config):
    prepare(config)
    assert set(json.loads((config.run_dir / "run.json").read_text())) == {"run_id", "started_on"}


def test_modules_used_before_the_ranks_import_no_torch():
    modules = ["checkpoint.start.preparation", "checkpoint.start.domains", "checkpoint.remote.copies", "storage.files"]
    script = f"import sys, {', '.join(f'rlhf.{name}' for name in modules)}; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


@pytest.mark.parametrize("name", [HISTORY, "events.jsonl"])
def test_a_file_that_another_folder_shares_is_not_appended_to(config, name):
    prepare(config)
    (config.run_dir / name).write_text("")
    prepare(config)
    os.link(config.run_dir / name, config.run_dir.parent / "copy")
    with pytest.raises(UserError) as raised:
        prepare(config)
    says(raised.value, name, "hard link", "cp -a")


@pytest.mark.parametrize("linked", [False, True])
def test_overwrite_empties_no_folder_that_is_not_a_run(config, tmp_path, linked):
    config.trainer.overwrite = True
    folder = config.run_dir
    if linked:
        folder = tmp_path / "home"
        folder.mkdir()
        config.run_dir.parent.mkdir(parents=True, exist_ok=True)
        config.run_dir.symlink_to(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("run.lock", "ranks.lock", "thesis.tex", "metrics.jsonl"):
        (folder / name).write_text("x")
    with pytest.raises(UserError) as caught:
        prepare(config)
    says(
        caught.value, "trainer.overwrite=true", "metrics.jsonl", str(config.run_dir), "trainer.experiment_name", "empty"
    )
    assert (folder / "thesis.tex").read_text() == (folder / "metrics.jsonl").read_text() == "x"
    (folder / "thesis.tex").unlink()
    (folder / "metrics.jsonl").unlink()
    prepare(config)
    assert names(config) == {"run.lock", "ranks.lock", "run.json"}


@pytest.mark.parametrize("mark", ["run.json", "resolved.yaml", "global_step_3", "global_step_3.damaged-1"])
def test_overwrite_knows_a_run_by_any_of_its_files(config, mark):
    config.trainer.overwrite = True
    (config.run_dir / mark).mkdir(parents=True) if "step" in mark else None
    config.run_dir.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", *([] if "step" in mark else [mark])):
        (config.run_dir / name).write_text("{}")
    prepare(config)
    assert names(config) == {"run.json"}


@pytest.mark.parametrize("left", [".tmp-run.json", ".tmp-token-0-x", ".trash-global_step_2"])
def test_an_overwrite_goes_on_after_a_kill_before_run_json(config, left):
    config.run_dir.mkdir(parents=True)
    (config.run_dir / left).write_text("x")
    config.trainer.overwrite = True
    prepare(config)
    assert names(config) == {"run.json"}


def test_an_overwrite_that_was_killed_goes_on(config, monkeypatch):
    save_steps(config, PlainRole(), 2)
    prepare(config)
    (config.run_dir / "zeta").write_text("x")
    config.trainer.overwrite = True
    removed: list[Path] = []

    def killed(path: Path) -> None:
        if len(removed) == 1:
            raise KeyboardInterrupt
        removed.append(path)
        path.unlink()

    monkeypatch.setattr(directory, "remove_file", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    assert steps(config) == []
    monkeypatch.undo()
    prepare(config)
    assert names(config) == {"run.json"}
