"""The way back: find the newest intact checkpoint, see that it fits the configuration, and bring everything to it."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from rlhf.checkpoint.commit import publication
from rlhf.checkpoint.commit.manifest import DOMAINS, Manifest, verify_files
from rlhf.checkpoint.load.locations import FileLocations, find_parts, published
from rlhf.checkpoint.load.restoring import LoadResult, load_state
from rlhf.checkpoint.save.snapshot import RunState
from rlhf.checkpoint.save.writer import Identity
from rlhf.config import Config
from rlhf.config.compare import check_resume
from rlhf.config.resolved import from_yaml
from rlhf.config.schema import SETTINGS
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import CONFIG, REFERENCE, set_aside_dirs
from rlhf.storage.shards import INDEX

log = logging.getLogger(__name__)
T = TypeVar("T")


def restore(
    config: Config, state: RunState, identity: Identity, coordinator: Coordinator, source: Path | None
) -> LoadResult | None:
    """Bring `state` and this rank's generators to the newest intact checkpoint of a run that is `identity`. Collective.

    Every byte of it is proven, most of them while they are loaded. When damage shows on any rank, all ranks set the checkpoint aside and
    start over with the one before. `source` is the checkpoint that the run was forked from, the last resort.

    Where nodes have disks of their own, a checkpoint counts when all of them together have every file. A newer one that is not complete is
    reported with what is nowhere, and set aside once an older one has been loaded.

    Returns None, with nothing changed, only for a run directory that never held a checkpoint. Raises UserError when all there were are
    damaged or not complete (a run must never start again at step 0 silently), or when one does not fit; `state` is of no use then.
    """

    def attempt(parts: FileLocations) -> LoadResult:
        wanted = config.checkpoint.load_contents or config.checkpoint.contents
        moving = state.reference is not None
        coordinator.on_rank(
            parts.holder(CONFIG),
            lambda: check_compatible(parts.path, parts.manifest, config, identity, wanted, moving_reference=moving),
        )
        return load_state(parts, state, wanted, config.trainer.seed, coordinator)

    return _with_newest_intact(config.run_dir, source, coordinator, attempt)


def _with_newest_intact(
    run_dir: Path, source: Path | None, coordinator: Coordinator, attempt: Callable[[FileLocations], T]
) -> T | None:
    """What `attempt` returns for the newest checkpoint that is complete and for which it does not raise DamagedCheckpoint."""
    stuck, incomplete = [], []
    for path in published(run_dir, coordinator):
        try:
            parts = find_parts(path, coordinator)
            if parts.nowhere and _is_divided(parts):
                incomplete.append(parts)
                if coordinator.is_leader:
                    log.error("%s; looking for an older one.", parts.told())
                continue
            result = attempt(parts)
        except DamagedCheckpoint as error:
            if not all(coordinator.on_domain_leaders(partial(_set_aside, path, error))):
                stuck.append(path.name)
            continue
        # Only now: where no checkpoint is complete, a disk that comes back must find everything as it was.
        for parts in incomplete:
            coordinator.on_domain_leaders(partial(_set_aside, parts.path))
        return result
    if source is not None:
        try:
            parts = find_parts(source, coordinator)
            if parts.nowhere and _is_divided(parts):
                raise DamagedCheckpoint(parts.told())
            return attempt(parts)
        except DamagedCheckpoint as error:
            raise UserError(f"trainer.resume_from_path cannot be used: {error}. Name another checkpoint.") from error
    aside = coordinator.on_domain_leaders(
        lambda: [path.name for reason in ("damaged", "incomplete") for path in set_aside_dirs(run_dir, reason)]
    )
    damaged = sorted({*stuck, *chain(*aside)})
    if incomplete:
        others = f" Damaged or set aside before: {', '.join(damaged)}." if damaged else ""
        raise UserError(
            f"No checkpoint in {run_dir} is complete, and the run will not start again at step 0 by itself. "
            f"{'. '.join(parts.told() for parts in incomplete)}.{others} Start again with the disks (or nodes) that have these files, in "
            "any order, or start anew with trainer.overwrite=true or another trainer.experiment_name."
        )
    if damaged:
        names = ", ".join(damaged)
        raise UserError(
            f"Every checkpoint in {run_dir} is damaged ({names}), and the run will not start again at step 0 by itself. "
            "Restore one from a backup, or start anew with trainer.overwrite=true or another trainer.experiment_name."
        )
    return None


def _is_divided(parts: FileLocations) -> bool:
    """Whether a file that is nowhere may be on a disk that is not here; in a directory that all have always shared, it is lost: damage."""
    return len(parts.held) > 1 or any(DOMAINS in entry for entry in parts.manifest.files.values())


def _set_aside(path: Path, damage: DamagedCheckpoint | None = None) -> bool:
    what = str(damage or f"{path} is not complete")
    try:
        if not path.exists():
            return True
        kept = publication.set_aside(path, "damaged" if damage else "incomplete")
    except OSError as error:
        # On a disk that fails a rename may fail like the reads. What matters is that the older checkpoint is used.
        log.error("%s. It cannot be set aside (%s); falling back to the checkpoint before it.", what, error)
        return False
    log.error("%s. It was set aside as %s; falling back to the checkpoint before it.", what, kept.name)
    return True


def check_compatible(
    path: Path,
    manifest: Manifest,
    config: Config,
    identity: Identity,
    load_contents: list[str],
    *,
    moving_reference: bool,
) -> None:
    """Raise UserError unless `config` may continue from this checkpoint; harmless differences are logged."""
    if not {"model", "hf_model"} & set(load_contents):
        raise UserError(
            f"Reading {load_contents} (checkpoint.load_contents, or else checkpoint.contents) from {path} restores no weights, so the run "
            "cannot continue. Add model to it if the checkpoint has it, else start anew with trainer.overwrite=true."
        )
    if missing := [item for item in load_contents if item not in manifest.contents]:
        raise UserError(
            f"checkpoint.load_contents={load_contents} asks for {', '.join(missing)}, but {path} holds {', '.join(manifest.contents)}. "
            f"Set checkpoint.load_contents to a subset of that."
        )
    if manifest.config_hash != identity.config_hash:  # reading a configuration takes longer than a small model
        if problems := verify_files(path, manifest, [CONFIG]):
            raise DamagedCheckpoint(f"{path} is damaged: {problems[0]}")
        check_resume(from_yaml((path / CONFIG).read_text()), config)
    if moving_reference and f"{REFERENCE}/{INDEX}" not in manifest.files:
        raise UserError(
            f"ref.update_freq={config.ref.update_freq} asks for a reference policy that moves, but {path} has none ({REFERENCE}): "
            "it was saved by a run whose reference was frozen. Set ref.update_freq=null to continue that run, or start anew with "
            "trainer.overwrite=true or another trainer.experiment_name."
        )
    if changes := _other_files(path, manifest, config, identity.fingerprints):
        text = "; ".join(changes)
        if not config.trainer.allow_config_change:
            raise UserError(
                f"{text}. Restore them, or accept that the run changes with trainer.allow_config_change=true."
            )
        log.warning("%s; going on because trainer.allow_config_change=true.", text)


def _other_files(path: Path, manifest: Manifest, config: Config, fingerprints: Mapping[str, str]) -> list[str]:
    """How the files that settings name differ from those of the checkpoint, one line per setting."""
    lines = []
    for setting in sorted(manifest.fingerprints.keys() | fingerprints.keys()):
        stored, present = manifest.fingerprints.get(setting), fingerprints.get(setting)
        if present is None:
            lines.append(f"{setting} was in use when {path} was saved, and is not now")
        elif stored != present:
            difference = "was not in use" if stored is None else "holds other files than"
            lines.append(f"{setting}={SETTINGS[setting].value(config)} {difference} when {path} was saved")
    return lines
