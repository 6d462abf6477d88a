"""The texts on how a run continues do what they say: with trainer.overwrite=true, the same command deletes the run."""

from pathlib import Path

import pytest

from rlhf.checkpoint.start import preparation
from rlhf.errors import EXIT_REQUEUE, RunEnded, UserError
from rlhf.ranks import next_start as texts
from rlhf.ranks.next_start import changes_to_continue, next_start
from rlhf.ranks.parent import LAUNCH
from rlhf.storage.layout import scan, step_dir
from tests.support.checkpoints import PlainRole, make_config, save_steps
from tests.support.sections import prepare

DELETES = " Giving the command again with trainer.overwrite=true deletes all checkpoints."
PLAIN = "The same command{} continues from {}."
LAUNCHED = "A restart by the launcher, or the same command{}, continues from {}."
MODES = {
    "auto": (False, "auto", "", ""),
    "resume_path": (False, "resume_path", "", ""),
    "overwrite": (True, "auto", " without trainer.overwrite=true", DELETES),
    "fork": (True, "resume_path", " without trainer.overwrite=true", DELETES),
    "disable": (False, "disable", " with trainer.resume_mode=auto", ""),
    "both": (True, "disable", " without trainer.overwrite=true and with trainer.resume_mode=auto", DELETES),
}


def as_launched(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    """Make this process a part of a launch. A scheduler, Ray and Kubernetes set LAUNCH; torchrun starts the ranks."""
    monkeypatch.delenv(LAUNCH, raising=False)
    if launcher in ("slurm", "ray", "kubernetes"):
        monkeypatch.setenv(LAUNCH, f"{launcher}-1")
    for module in (texts, preparation):
        monkeypatch.setattr(module, "torchrun_agent", lambda: "agent" if launcher == "torchrun" else None)


@pytest.mark.parametrize("launcher", ["local", "torchrun", "slurm", "ray", "kubernetes"])
@pytest.mark.parametrize("mode", ["auto", "overwrite", "disable", "both"])
def test_the_text_is_true_of_a_restart_of_the_same_command_and_of_the_changed_command(
    tmp_path, monkeypatch, mode, launcher
):
    config = make_config(tmp_path)
    config.trainer.overwrite, config.trainer.resume_mode, changes, end = MODES[mode]
    as_launched(monkeypatch, launcher)
    prepare(config)
    save_steps(config, PlainRole(), 4)
    newest = step_dir(config.run_dir, 4)
    restarts = launcher != "local" and mode != "auto"
    text = next_start(newest, config.trainer)
    assert text == (LAUNCHED if restarts else PLAIN).format(changes, newest) + end
    if restarts:
        prepare(config)
        assert scan(config.run_dir) == [newest], "a restart by the launcher keeps the launch's own checkpoints"
    as_launched(monkeypatch, "local")
    given = config.trainer.overwrite, config.trainer.resume_mode
    config.trainer.overwrite, config.trainer.resume_mode = False, "auto"
    prepare(config)
    assert scan(config.run_dir) == [newest], "the changed command continues"
    config.trainer.overwrite, config.trainer.resume_mode = given
    if mode == "disable":
        with pytest.raises(UserError, match=r"trainer\.resume_mode=disable"):
            prepare(config)
    else:
        prepare(config)
    assert scan(config.run_dir) == ([] if end else [newest])


@pytest.mark.parametrize("mode", MODES)
def test_a_run_without_a_checkpoint_starts_again(mode, monkeypatch):
    config = make_config(Path("runs"))
    config.trainer.overwrite, config.trainer.resume_mode, changes, _ = MODES[mode]
    assert changes_to_continue(config.trainer) == changes
    as_launched(monkeypatch, "torchrun")
    assert next_start(None, config.trainer) == "The same command starts the run again."


def test_a_run_from_python_names_the_change():
    changes = MODES["overwrite"][2]
    assert str(RunEnded(EXIT_REQUEUE, Path("run"), changes)).endswith(
        "75. The same call without trainer.overwrite=true continues the run."
    )
