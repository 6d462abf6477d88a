"""Starts on a disk that became read-only: a finished run prints its report, any other run an error."""

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf import lifecycle
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.launch.supervisor import supervise
from tests.support.checkpoints import PlainRole, save_steps
from tests.support.launching import ranks
from tests.support.refusals import says
from tests.support.sections import prepare
from tests.support.small_disks import small_disk


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8) as folder:
        yield folder


def command(disk: Path, *more: str) -> list[str]:
    return [f"trainer.default_local_dir={disk}", "trainer.device=cpu", "trainer.warm_start=false", *more]


def saved(disk: Path, step: int) -> None:
    """A run of 80 steps at `step`, on a disk that is read-only now."""
    config = compose_config(command(disk, "checkpoint.async_save=false"), Library.find(None))
    save_steps(config, PlainRole(), step)
    prepare(config)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 80, "val/accuracy": 0.875}\n')
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def test_a_finished_run_reports_under_our_supervisor(disk, capsys):
    saved(disk, 80)
    assert supervise(compose_config(command(disk), Library.find(None)), lambda: None) == EXIT_DONE
    output = capsys.readouterr().err
    assert "is finished at step 80. Nothing is written" in output
    assert "87.5% after" in output
    with pytest.raises(UserError, match="Cannot read or write the run directory"):
        supervise(compose_config(command(disk, "trainer.overwrite=true"), Library.find(None)), lambda: None)
    with pytest.raises(UserError, match="Cannot read or write the run directory"):
        supervise(compose_config(command(disk, "trainer.total_training_steps=81"), Library.find(None)), lambda: None)


@pytest.mark.parametrize("named", [True, False])
def test_a_transient_disk_error_is_one_message(tmp_path, capsys, monkeypatch, named):
    """The error names the path, which the system omits for a failed read or sync."""

    def fail(path: Path, _: str) -> None:
        raise OSError(errno.EIO, "Input/output error", *([str(path)] if named else []))

    monkeypatch.setattr(lifecycle, "replace_durably", fail)
    config = compose_config(command(tmp_path), Library.find(None))
    assert supervise(config, lambda: None) == EXIT_CRASHED
    output = capsys.readouterr().err
    path = config.run_dir / "resolved.yaml" if named else config.run_dir
    says(output, f"{path}: ", "Input/output error", "again")
    assert "Traceback" not in output


def test_a_finished_run_reports_under_torchrun(disk, tmp_path):
    saved(disk, 80)
    end = ranks(tmp_path / "log", command(disk), nproc=2)
    assert end.code == EXIT_DONE, end.output
    assert "is finished at step 80. Nothing is written" in end.output
    end = ranks(tmp_path / "log", command(disk, "trainer.seed=2"), nproc=2)
    assert end.code == EXIT_USER_ERROR
    assert "trainer.seed: 1 in the checkpoint, 2 now" in end.output


def test_a_run_that_would_train_says_what_is_wrong(disk, tmp_path):
    saved(disk, 20)
    with pytest.raises(UserError, match=r"Read-only file system.*Fix this, or set trainer\.default_local_dir"):
        supervise(compose_config(command(disk), Library.find(None)), lambda: None)
    end = ranks(tmp_path / "log", command(disk))
    assert end.code == EXIT_USER_ERROR
    assert "Read-only file system" in end.output
    assert "Fix it and run the same command again." in end.output
    assert "Traceback" not in end.output
