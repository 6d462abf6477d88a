"""Checks that a checkpoint fits the run that resumes it: contents, configuration and model files."""

import logging
from collections.abc import Mapping
from pathlib import Path

from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.load.stored_config import BASE, CODE, changes_since, check_base
from rlhf.config.compare import NEW_RUN, SECRETS, ResolvedConfig, log_changes, reject_changes
from rlhf.errors import UserError
from rlhf.storage.layout import INDEX, REFERENCE

log = logging.getLogger(__name__)


def check_compatible(
    path: Path,
    manifest: Manifest,
    config: ResolvedConfig,
    identity: Identity,
    load_contents: list[str],
    *,
    moving_reference: bool,
    allow_change: bool,
    begins: bool = False,
) -> frozenset[str]:
    """Raise UserError unless the run `identity` with `config` may continue from this checkpoint; log differences.

    Return the settings whose values or files change the run. `moving_reference`: whether `ref.update_freq` is set.
    `allow_change`: `trainer.allow_config_change`. `begins`: whether a new run begins at this checkpoint
    (`trainer.resume_mode=resume_path`). For an imported checkpoint, check only the contents, because it
    belongs to no run.
    """
    if not {"model", "hf_model"} & set(load_contents):
        raise UserError(
            f"Reading {', '.join(load_contents)} from {path} restores no weights, so the run cannot continue. Add "
            "model to checkpoint.load_contents if the checkpoint has it, else start anew with trainer.overwrite=true."
        )
    if missing := [item for item in load_contents if item not in manifest.contents]:
        raise UserError(
            f"checkpoint.load_contents={load_contents} asks for {', '.join(missing)}, but {path} holds "
            f"{', '.join(manifest.contents)}. Set checkpoint.load_contents (by default checkpoint.contents) to a "
            "subset of these parts."
        )
    if manifest.imported:
        return frozenset()
    changes = changes_since(path, manifest, config)
    # Promise 13.
    reject_changes(changes, allow=allow_change, begins=begins)
    check_base(path, manifest, config, changes, identity.fingerprints.get(BASE, ""))
    if moving_reference and f"{REFERENCE}/{INDEX}" not in manifest.files:
        raise UserError(
            f"ref.update_freq={config.setting('ref.update_freq')} asks for a reference policy that moves, but {path} "
            f"has none ({REFERENCE}): it was saved by a run whose reference was frozen. Set ref.update_freq=null to "
            "continue that run, or start anew with trainer.overwrite=true or another trainer.experiment_name."
        )
    others = _other_files(path, manifest, config, identity.fingerprints)
    if others:
        text = "; ".join(others.values())
        if not allow_change:
            other = "" if begins else f"; or {NEW_RUN}"
            raise UserError(
                f"{text}. Restore the files, or set trainer.allow_config_change=true to accept that the run "
                f"changes{other}."
            )
        log.warning("%s; continuing because trainer.allow_config_change=true.", text)
    log_changes(changes)
    if config.not_compared:
        log.info(SECRETS, ", ".join(config.not_compared))
    return frozenset(change.key for change in changes.trajectory) | others.keys()


def _other_files(
    path: Path, manifest: Manifest, config: ResolvedConfig, fingerprints: Mapping[str, str]
) -> dict[str, str]:
    """Return a line for each setting whose files differ from the files at the checkpoint's save."""
    lines = {}
    for setting in sorted(manifest.fingerprints.keys() | fingerprints.keys()):
        stored, present = manifest.fingerprints.get(setting), fingerprints.get(setting)
        if setting == CODE and stored is None:
            continue  # older checkpoints have no hash of the code
        if present is None:
            lines[setting] = f"{setting} was in use when {path} was saved, and is not in use now"
        elif stored != present:
            difference = "was not in use" if stored is None else "holds other files than"
            lines[setting] = f"{setting}={config.setting(setting)} {difference} when {path} was saved"
    return lines


def same_bits_problems(manifest: Manifest, identity: Identity, world_size: int) -> list[str]:
    """Return one line per reason why later steps may have other bits than in the run that saved the checkpoint.

    Reasons are another number of ranks or CPU threads, and other versions; settings are not compared. The result is
    empty for an imported checkpoint, which no run of this trainer saved.
    """
    if manifest.imported:
        return []
    lines = []
    if manifest.world_size != world_size:
        writers = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
        lines.append(f"The checkpoint was saved by {writers} and continues with {world_size}")
    elif manifest.threads != identity.threads:
        saved, present = (", ".join(map(str, sorted(set(threads)))) for threads in (manifest.threads, identity.threads))
        lines.append(f"Ranks had {saved} CPU threads each at the save and {present} now (trainer.threads_per_rank)")
    if manifest.numerics != identity.numerics:
        before, now = manifest.release, identity.versions.get("rlhf")
        lines.append(
            f"The checkpoint was saved with numerics version {manifest.numerics} (rlhf {before}) and continues with "
            f"{identity.numerics} (rlhf {now})"
        )
    # Releases of one numerics version compute the same bits.
    for name in sorted((manifest.versions.keys() | identity.versions.keys()) - {"rlhf"}):
        saved, present = (versions.get(name, "none") for versions in (manifest.versions, identity.versions))
        if saved != present:
            lines.append(f"The checkpoint was saved with {name} {saved} and continues with {present}")
    return lines
