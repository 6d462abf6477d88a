"""Compares the run in a directory with the requested run before ranks start. Imports no torch.

The ranks of a resume compare again, but only after they have loaded their models. A finished run starts no ranks.
"""

from collections.abc import Collection
from functools import partial
from pathlib import Path

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.commit.user_files import USER_FILES, hash_of_value
from rlhf.checkpoint.load.locations import locate_files, published
from rlhf.checkpoint.load.stored_config import BASE, changes_since, check_base
from rlhf.checkpoint.start.run_dir import at_end, driver_state_of, planned_steps, resume_source
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.config.compare import MODEL_NAMES, NEW_RUN, RUN_LENGTH, ResolvedConfig, as_lines, reject_changes
from rlhf.config.overrides import hydra_value
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.config.secrets import masked
from rlhf.errors import UserError
from rlhf.models.fingerprint import fingerprint
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint, OtherFormat
from rlhf.storage.layout import CONFIG

EXPORT_SETTINGS = ("checkpoint.contents", "checkpoint.hf_dtype", "checkpoint.hf_adapter")
"""Settings of the Hugging Face export. If `checkpoint.contents` has `hf_model`, these settings affect even a finished
run."""


def check_same_run(
    run_dir: Path, trainer: TrainerConfig, config: ResolvedConfig, resumed_from: str | None, coordinator: Coordinator
) -> None:
    """Raise UserError if the checkpoint to resume has another format or settings of another run, or is past the last
    planned step (a `trainer.resume_from_path`: at or past it). Collective; changes nothing. `resumed_from`: the entry
    in run.json."""
    source = resume_source(trainer)
    forks = source is not None and coordinator.broadcast(str(source)) != resumed_from
    paths = [] if forks else published(run_dir, coordinator)
    for path in [*paths, *([] if source is None else [source])]:
        try:
            located = locate_files(path, coordinator)
            if located.missing and located.may_be_elsewhere:
                continue
            check = partial(_check, path, located.manifest, config, trainer, begins=path == source)
            coordinator.on_rank(located.source_domain(CONFIG), check)
        except OtherFormat as error:
            raise UserError(f"{error}; or {NEW_RUN}.") from None
        except DamagedCheckpoint:
            continue  # a resume skips the checkpoint too, and logs the damage
        return


def check_unprepared(run_dir: Path, trainer: TrainerConfig, config: ResolvedConfig, coordinator: Coordinator) -> bool:
    """Call `check_same_run` before this start has prepared the directory. Return False, without a check, for
    `overwrite=true` or `resume_mode=disable`. Collective."""
    if trainer.overwrite or trainer.resume_mode == "disable":
        return False
    run = coordinator.on_leader(lambda: read_run_file(run_dir))
    check_same_run(run_dir, trainer, config, run.get("resumed_from"), coordinator)
    return True


def _check(path: Path, manifest: Manifest, config: ResolvedConfig, trainer: TrainerConfig, *, begins: bool) -> None:
    if manifest.imported:  # this checkpoint belongs to no run: it has no settings and no length
        return
    diff = changes_since(path, manifest, config)
    if (driver := driver_state_of(path)) is not None:
        step, planned = driver["step"], planned_steps(trainer, driver["steps_per_epoch"])
        if step > planned and not begins and all(change.key in RUN_LENGTH for change in diff.trajectory):
            length = "total_epochs" if trainer.total_training_steps is None else "total_training_steps"
            raise UserError(
                f"trainer.{length}={getattr(trainer, length)} asks for {planned} steps, and the run in {path.parent} "
                f"has done {step}. Set trainer.total_training_steps={step} or more for that run; or {NEW_RUN}."
            )
        if at_end(trainer, driver) and begins:
            raise UserError(
                f"trainer.resume_from_path={path} is at step {step}, and nothing is left to train from there. Raise "
                "trainer.total_training_steps (or trainer.total_epochs), or name an earlier checkpoint."
            )
        if at_end(trainer, driver) and diff.trajectory:
            raise UserError(
                f"the run in {path.parent} is finished at step {step}, and it had other settings:\n"
                f"{as_lines(diff.trajectory)}\n"
                f"To run with the new settings, {NEW_RUN}. To continue the finished run with the new settings, raise "
                "trainer.total_training_steps and set trainer.allow_config_change=true."
            )
    reject_changes(diff, allow=trainer.allow_config_change, begins=begins)
    folder = Path(config.setting(BASE)).expanduser()
    if folder.is_dir() and any(change.key == BASE for change in diff.harmless):
        check_base(path, manifest, config, diff, fingerprint(folder))
    if not trainer.allow_config_change and not (driver is not None and at_end(trainer, driver)):
        _check_renamed_models(path, manifest, config, {change.key for change in diff.harmless})


def _check_renamed_models(path: Path, manifest: Manifest, config: ResolvedConfig, changed: Collection[str]) -> None:
    """Raise UserError when a `changed` setting names a folder with other model files; the ranks compare Hub models."""
    for setting, stored in manifest.fingerprints.items():
        if setting not in changed or (name := config.setting(setting)) is None:
            continue
        folder = Path(name).expanduser()
        if folder.is_dir() and fingerprint(folder) != stored:
            raise UserError(
                f"{setting}={name} holds other files than when {path} was saved. Restore the files, or set "
                f"trainer.allow_config_change=true to accept that the run changes; or {NEW_RUN}."
            )


def compare_finished(path: Path, manifest: Manifest, config: ResolvedConfig) -> list[str]:
    """Return log lines about changed settings without effect on a finished run's results, and about users' files.

    A user's file gets a line if it cannot be read, or if it has changed and `trainer.allow_config_change` is true.
    Without this setting, a user's file that has changed raises UserError. A changed model file always does.
    """
    harmless = changes_since(path, manifest, config).harmless
    others = _other_models(manifest, config, [change.key for change in harmless if change.key in MODEL_NAMES])
    lines = []
    for setting in (key for key in USER_FILES if key in manifest.fingerprints):
        value = config.setting(setting)
        shown = f"{setting}={hydra_value(masked(value))}"
        try:
            if hash_of_value(setting, value) == manifest.fingerprints[setting]:
                continue
            if config.setting("trainer.allow_config_change"):
                lines.append(f"{shown} holds other files than the run used")
            else:
                others.append(shown)
        except OSError as error:
            # The report of a finished run must remain available even if the user has removed these files.
            lines.append(f"{shown} is not compared: {error.filename} cannot be read ({error.strerror})")
    if others:
        raise UserError(
            f"the run in {path.parent} is finished at step {manifest.step}, and {' and '.join(others)} "
            f"{'holds' if len(others) == 1 else 'hold'} other files than the run used. To get its report, restore the "
            "files (for files other than models, trainer.allow_config_change=true suffices). To run with these files, "
            f"{NEW_RUN}. To continue the finished run with these files, set trainer.allow_config_change=true and raise "
            "trainer.total_training_steps."
        )
    exported = EXPORT_SETTINGS if "hf_model" in config.setting("checkpoint.contents") else ()
    unused = [change for change in harmless if change.key not in (*MODEL_NAMES, *exported)]
    return [*lines, *(f"this changed setting has no effect: {change}" for change in unused)]


def _other_models(manifest: Manifest, config: ResolvedConfig, renamed: Collection[str]) -> list[str]:
    """Return the settings, with their values, whose model has other files than the run's."""
    others = []
    for setting, stored in manifest.fingerprints.items():
        if setting not in MODEL_NAMES or (name := config.setting(setting)) is None:
            continue
        folder, section = Path(name).expanduser(), setting.partition(".")[0]
        # For a Hub name only the name can be compared here.
        same = fingerprint(folder) == stored if folder.is_dir() else not any(section in key for key in renamed)
        if not same:
            others.append(f"{setting}={name}")
    return others
