"""Resumes a run from the newest intact checkpoint that fits the configuration."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.commit.removal import set_aside
from rlhf.checkpoint.load.compatibility import check_compatible
from rlhf.checkpoint.load.from_memory import HistoryPlace, MemoryPlace, Stale, locate_snapshot
from rlhf.checkpoint.load.locations import FileLocations, locate_files, published, reject_lost
from rlhf.checkpoint.load.restoring import LoadResult, load_state
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config.compare import NEW_RUN, ResolvedConfig
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint, OtherFormat
from rlhf.storage.layout import CONFIG, HISTORY, INDEX, REFERENCE, SCHEDULE, set_aside_dirs, step_of

log = logging.getLogger(__name__)
T = TypeVar("T")
_GENERATORS = "generators"


def restore(
    run_dir: Path,
    trainer: TrainerConfig,
    settings: CheckpointConfig,
    config: ResolvedConfig,
    state: RunState,
    identity: Identity,
    coordinator: Coordinator,
    source: Path | None,
    memory: MemoryPlace | None = None,
) -> LoadResult | None:
    """Restore `state` and this rank's generators from the newest intact checkpoint of the run `identity`. Collective.

    Verifies every byte, most while loading. When any rank finds damage, all ranks set the checkpoint aside and try the
    next older one, then `source` (`trainer.resume_from_path`; `checkpoint.load_contents` selects its parts to load).

    If nodes have their own disks, a checkpoint is complete when all disks together have every file. Incomplete
    checkpoints are logged with their missing files, and set aside once an older checkpoint is loaded.

    Snapshots in `memory` are tried like checkpoints, newest first. If a checkpoint and a snapshot have the same step,
    the checkpoint comes first. A snapshot that cannot be used is only logged, because no snapshot counts as saved.

    Returns None, with nothing changed, only for a run directory that never had a checkpoint. Raises UserError if every
    checkpoint is damaged or incomplete (a run must never silently start again at step 0), or if a checkpoint does not
    fit the configuration. Raises RuntimeError if the ranks must restart before they can load the checkpoint: the load
    of a damaged checkpoint has overwritten parts that this checkpoint lacks. After an error, `state` is undefined.
    """
    overwritten: set[str] = set()

    def attempt(located: FileLocations, ranks: Coordinator) -> LoadResult:
        begins = source is not None and located.path.parent.resolve() / located.path.name == source
        wanted = _parts_to_load(located.manifest, settings, begins=begins)
        if located.manifest.imported:
            _check_steps_left(located, state)
        restored, kept = _divide(located.manifest, state, wanted)
        _reject_mixed(located.path, [part for part in kept if part in overwritten])
        check = partial(
            check_compatible,
            located.path,
            located.manifest,
            config,
            identity,
            wanted,
            moving_reference=state.reference is not None,
            allow_change=trainer.allow_config_change,
            begins=begins,
        )
        changed = ranks.on_rank(located.source_domain(CONFIG), check)
        left_out = [part for part in ("optimizer", "extra") if part not in wanted]
        if located.manifest.imported and coordinator.is_leader:
            log.warning("%s", _describe_start(located, state, wanted))
        elif left_out and coordinator.is_leader:
            why = "as set by checkpoint.load_contents" if begins else "which were not saved, so the results change"
            log.warning("%s: the run continues without its %s, %s.", located.path, " and ".join(left_out), why)
        overwritten.update(restored)
        return replace(load_state(located, state, wanted, trainer.seed, ranks, changed), kept=kept)

    history = HistoryPlace(run_dir / HISTORY, on_own_disk=len(coordinator.domain_leaders) > 1)
    snapshots = None if memory is None else _Snapshots(memory, history, state.driver.total_steps)
    return _with_newest_intact(run_dir, source, settings.remote, coordinator, attempt, snapshots)


def _parts_to_load(manifest: Manifest, settings: CheckpointConfig, *, begins: bool) -> list[str]:
    if begins and settings.load_contents is not None:
        return settings.load_contents
    # The contents of an imported checkpoint depend on its source, not on this run's settings. A restart must not change
    # the run, so a restart loads everything that was saved.
    return settings.contents if begins and not manifest.imported else manifest.contents


@dataclass(frozen=True)
class _Snapshots:
    """The snapshots in memory that a resume tries, except snapshots of steps after `last_step`, the run's last step."""

    place: MemoryPlace
    history: HistoryPlace
    last_step: int

    def attempt(self, path: Path, attempt: Callable[[FileLocations, Coordinator], T]) -> T | None:
        """Return the result of `attempt`, or None if the snapshot is damaged or stale. Collective."""
        ranks = self.place.coordinator
        try:
            located = locate_snapshot(path, self.place, self.history, self.last_step)
        except (Stale, DamagedCheckpoint) as error:
            if ranks.is_leader:
                log.warning("The snapshot in memory of step %s is not used: %s", step_of(path), error)
            return None
        return attempt(located, ranks)


def _candidates(run_dir: Path, snapshots: _Snapshots | None, coordinator: Coordinator) -> list[Path]:
    """Return checkpoints and snapshots, newest first; of the same step, the checkpoint first. Collective."""
    found = published(run_dir, coordinator)
    if snapshots is not None:
        found += published(snapshots.place.folder, snapshots.place.coordinator)
    return sorted(found, key=lambda path: -(step_of(path) or 0))


def _with_newest_intact(
    run_dir: Path,
    source: Path | None,
    remote: str | None,
    coordinator: Coordinator,
    attempt: Callable[[FileLocations, Coordinator], T],
    snapshots: _Snapshots | None,
) -> T | None:
    """Return the result of `attempt` for the newest complete checkpoint or snapshot that is not damaged.

    Without one, return the result for `source`, or None if there is no `source` and the run never had a checkpoint.
    """
    stuck: list[str] = []
    incomplete: list[FileLocations] = []
    for path in _candidates(run_dir, snapshots, coordinator):
        try:
            if snapshots is not None and path.parent == snapshots.place.folder:
                result = snapshots.attempt(path, attempt)
            else:
                result = _attempt_complete(path, coordinator, attempt, incomplete)
            if result is None:
                continue
        except OtherFormat as error:
            # Promise 10: another format is not damage. Do not set the checkpoint aside, and load no older checkpoint.
            raise UserError(f"{error}; or {NEW_RUN}.") from None
        except DamagedCheckpoint as error:
            moved = all(coordinator.on_domain_leaders(partial(_set_aside, path, error)))
            # A snapshot has passed its check, so its load has overwritten the state with which step 0 would begin.
            if not moved or (snapshots is not None and path.parent == snapshots.place.folder):
                stuck.append(path.name)
            continue
        # Set incomplete checkpoints aside only after a load: until then, a disk may return and complete a checkpoint.
        for located in incomplete:
            coordinator.on_domain_leaders(partial(_set_aside, located.path))
        return result
    if source is not None:
        return from_source(source, coordinator, lambda located: attempt(located, coordinator))
    # Promise 5.
    _reject_second_start(run_dir, remote, stuck, incomplete, coordinator)
    return None


def _attempt_complete(
    path: Path,
    coordinator: Coordinator,
    attempt: Callable[[FileLocations, Coordinator], T],
    incomplete: list[FileLocations],
) -> T | None:
    """Return the result of `attempt`. If missing files may be on an absent disk, add the checkpoint to `incomplete`
    and return None."""
    located = locate_files(path, coordinator)
    if located.missing and located.may_be_elsewhere:
        incomplete.append(located)
        if coordinator.is_leader:
            log.error("%s; trying the checkpoint before it.", located.missing_text())
        return None
    return attempt(located, coordinator)


def from_source(source: Path, coordinator: Coordinator, attempt: Callable[[FileLocations], T]) -> T:
    """Return the result of `attempt` for the checkpoint `source`. Collective. Raise UserError if it is damaged."""
    try:
        located = locate_files(source, coordinator)
        if located.missing and located.may_be_elsewhere:
            raise DamagedCheckpoint(located.missing_text())
        return attempt(located)
    except DamagedCheckpoint as error:
        raise UserError(f"trainer.resume_from_path cannot be used: {error}. Name another checkpoint.") from error


def _reject_second_start(
    run_dir: Path, remote: str | None, stuck: list[str], incomplete: list[FileLocations], coordinator: Coordinator
) -> None:
    """Raise UserError if the run has had checkpoints. `remote`: `checkpoint.remote`. `stuck`: damaged checkpoints that
    could not be set aside. Collective."""
    aside = coordinator.on_domain_leaders(
        lambda: [path.name for reason in ("damaged", "incomplete") for path in set_aside_dirs(run_dir, reason)]
    )
    damaged = sorted({*stuck, *chain(*aside)})
    if incomplete:
        others = f" Damaged or set aside before: {', '.join(damaged)}." if damaged else ""
        raise UserError(
            f"No checkpoint in {run_dir} is complete, and the run will not start again at step 0 by itself. "
            f"{'. '.join(located.missing_text() for located in incomplete)}.{others} Start again with the disks (or "
            "nodes) that have these files; their order does not matter. Or start anew with trainer.overwrite=true or "
            "another trainer.experiment_name."
        )
    if damaged:
        names = ", ".join(damaged)
        remedy = "Restore"
        # A start downloads copies only into a directory without checkpoints, and this start's directory had some.
        if remote is not None and not published(run_dir, coordinator):
            remedy = (
                "The next start with trainer.resume_mode=auto and trainer.overwrite=false downloads the newest copy "
                f"from checkpoint.remote={remote}. If there is none, restore"
            )
        raise UserError(
            f"Every checkpoint in {run_dir} is damaged ({names}), and the run will not start again at step 0 by "
            f"itself. {remedy} a checkpoint from a backup, or start anew with trainer.overwrite=true or another "
            "trainer.experiment_name."
        )
    reject_lost(run_dir, coordinator)


def _set_aside(path: Path, damage: DamagedCheckpoint | None = None) -> bool:
    what = str(damage or f"{path} is not complete")
    try:
        if not path.exists():
            return True
        kept = set_aside(path, "damaged" if damage else "incomplete")
    except OSError as error:
        # On a failing disk a rename may fail too. The run can still use the older checkpoint.
        log.error("%s. It cannot be set aside (%s); falling back to the checkpoint before it.", what, error)
        return False
    log.error("%s. It was set aside as %s; falling back to the checkpoint before it.", what, kept.name)
    return True


def _check_steps_left(located: FileLocations, state: RunState) -> None:
    """Raise UserError for a checkpoint at the run's last step or beyond. Only ranks can compute the last step."""
    step = located.manifest.step
    if state.driver.ends_with(step, 0.0):
        raise UserError(
            f"trainer.resume_from_path={located.path} is at step {step}, and nothing is left to train from there: the "
            f"run has {state.driver.total_steps} steps in all. Raise trainer.total_training_steps (or "
            "trainer.total_epochs), or import the checkpoint as global_step_0."
        )


def _divide(manifest: Manifest, state: RunState, load_contents: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the parts of `state` that a load restores, and the parts that it keeps as they are.

    All other parts are always restored, or set to their values at step 0.
    """

    def has(name: str) -> bool:
        return not manifest.imported or name in manifest.files

    is_restored = dict[str, bool]()
    for role in state.roles:
        is_restored[f"{role}'s weights"] = role in manifest.roles
        is_restored[f"{role}'s moments"] = "optimizer" in load_contents and has(f"{role}/optimizer/{INDEX}")
        is_restored[f"{role}'s schedule"] = "extra" in load_contents and has(f"{role}/{SCHEDULE}")
    if state.reference is not None:
        is_restored["reference"] = has(f"{REFERENCE}/{INDEX}")
    is_restored[_GENERATORS] = "extra" in load_contents
    kept = [part for part, found in is_restored.items() if not found]
    return [part for part in is_restored if part not in kept], kept


def _reject_mixed(path: Path, mixed: list[str]) -> None:
    # A run with weights of step 0 once went on with the moments of a damaged checkpoint of a later step.
    if mixed:
        raise RuntimeError(
            f"{path} lacks {', '.join(mixed)}, which the load of a damaged checkpoint has overwritten. They start "
            "afresh once the ranks start again."
        )


def _describe_start(located: FileLocations, state: RunState, load_contents: Collection[str]) -> str:
    """Return one line about the imported checkpoint's source and the parts of `state` that start afresh."""
    manifest = located.manifest
    parts = _divide(manifest, state, load_contents)
    restored, fresh = ([part for part in each if part != _GENERATORS] for each in parts)
    fresh += [_GENERATORS, *state.stateful]
    origin = f"{manifest.imported['path']} ({manifest.imported['layout']})"
    return (
        f"{located.path} was imported from {origin}. A new run begins there, after step {manifest.step}, with "
        f"{', '.join(restored)}. It does not continue that run bit for bit: {', '.join(fresh)} start afresh."
    )
