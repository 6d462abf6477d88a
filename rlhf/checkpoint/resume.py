"""The way back: find the newest intact checkpoint, prove it, compare configurations, and put every piece of state where it was."""

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors.torch import load as load_safetensors

from rlhf.checkpoint import commit
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.errors import DamagedCheckpoint
from rlhf.checkpoint.layout import CONFIG, DRIVER_STATE, rank_file, scan, set_aside_dirs
from rlhf.checkpoint.manifest import Manifest, read_manifest, share_of_files, verify_files
from rlhf.checkpoint.rng import seed_everything, set_rng_state
from rlhf.checkpoint.snapshot import HF_FOLDER, Role
from rlhf.checkpoint.tensors import TensorReader
from rlhf.config import Config
from rlhf.config.compare import check_resume
from rlhf.config.files import from_yaml
from rlhf.errors import UserError

log = logging.getLogger(__name__)


def find_intact(run_dir: Path, coordinator: Coordinator, source: Path | None = None) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose every byte is as committed; damaged newer ones are set aside and reported. Collective.

    `source` is the checkpoint that the run was forked from, the last resort. Returns None only for a run directory that never held a
    checkpoint. Raises UserError when all there were are damaged: a run must never start again at step 0 silently.
    """
    for path in coordinator.on_leader(lambda: scan(run_dir)):
        try:
            return path, verify_together(path, coordinator)
        except DamagedCheckpoint as error:
            kept = coordinator.on_leader(partial(commit.set_aside, path, "damaged"))
            if coordinator.is_leader:
                log.error("%s. It was set aside as %s; falling back to the checkpoint before it.", error, kept.name)
    if source is not None:
        try:
            return source, verify_together(source, coordinator)
        except DamagedCheckpoint as error:
            raise UserError(f"trainer.resume_from_path cannot be used: {error}. Name another checkpoint.") from error
    if damaged := coordinator.on_leader(lambda: set_aside_dirs(run_dir, "damaged")):
        names = ", ".join(path.name for path in damaged)
        raise UserError(
            f"Every checkpoint in {run_dir} is damaged ({names}), and the run will not start again at step 0 by itself. "
            "Restore one from a backup, or start anew with trainer.overwrite=true or another trainer.experiment_name."
        )
    return None


def verify_together(path: Path, coordinator: Coordinator) -> Manifest:
    """Verify a checkpoint, its files shared out among the ranks; raises DamagedCheckpoint on every rank. Collective."""
    manifest = coordinator.on_leader(lambda: read_manifest(path))
    mine = share_of_files(manifest, coordinator.rank, coordinator.world_size)
    found = coordinator.everywhere(lambda: verify_files(path, manifest, mine))
    if problems := [line for lines in found for line in lines]:
        raise DamagedCheckpoint(f"{path} is damaged: " + "; ".join(problems))
    return manifest


def check_compatible(
    path: Path, manifest: Manifest, config: Config, fingerprint: str, load_contents: list[str]
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
    check_resume(from_yaml((path / CONFIG).read_text()), config)
    if manifest.model_fingerprint != fingerprint:
        text = f"model.path={config.model.path} holds other files than when {path} was saved"
        if not config.trainer.allow_config_change:
            raise UserError(
                f"{text}. Restore them, or accept that the run changes with trainer.allow_config_change=true."
            )
        log.warning("%s; going on because trainer.allow_config_change=true.", text)


def load_state(
    path: Path, manifest: Manifest, roles: Mapping[str, Role], load_contents: list[str], seed: int, rank: int
) -> dict[str, Any]:
    """Fill every role from a verified checkpoint, restore this rank's RNG, and return the driver state."""
    for name, role in roles.items():
        if name not in manifest.roles:
            raise UserError(f"{path} has no {name}; it holds {', '.join(manifest.roles)}.")
        if "model" in load_contents:
            _load(TensorReader.of_component(path / name / "model"), role.model_pieces(), path, f"{name}'s weights")
        elif "hf_model" in load_contents:
            # By the manifest, not by what lies there: only those files were verified.
            files = [f for f in map(PurePosixPath, manifest.files) if f.parent == PurePosixPath(name, HF_FOLDER)]
            weights = [f.name for f in files if f.suffix == ".safetensors"]
            reader = TensorReader.of_whole_tensors(path / name / HF_FOLDER, weights)
            _load(reader, role.model_pieces(), path, f"{name}'s weights")
        if "optimizer" in load_contents:
            _load(
                TensorReader.of_component(path / name / "optimizer"),
                role.optimizer_pieces(),
                path,
                f"{name}'s optimizer",
            )
        if "extra" in load_contents:
            role.load_extra_state(json.loads((path / name / "extra" / "lr_scheduler.json").read_text()))
    if "extra" in load_contents:
        _load_rng(path, manifest, seed, rank)
    return json.loads((path / DRIVER_STATE).read_text())


def _load(reader: TensorReader, pieces: Any, path: Path, what: str) -> None:
    if mismatches := reader.mismatches(pieces):
        shown = "; ".join(mismatches[:5]) + (f"; and {len(mismatches) - 5} more" if len(mismatches) > 5 else "")
        raise UserError(f"{what} in {path} are of another architecture than model.path: {shown}.")
    reader.read_into(pieces)


def _load_rng(path: Path, manifest: Manifest, seed: int, rank: int) -> None:
    name = f"rng/{rank_file(rank)}"
    if name in manifest.files:
        # load() copies out of the bytes; nothing keeps a view into a published file.
        set_rng_state({key: tensor.clone() for key, tensor in load_safetensors((path / name).read_bytes()).items()})
        return
    log.warning(
        "%s was saved by %d ranks and has no RNG state for rank %d; seeded afresh.", path, manifest.world_size, rank
    )
    seed_everything(seed + manifest.step, rank)
