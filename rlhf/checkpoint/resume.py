"""The way back: find the newest intact checkpoint, prove it, compare configurations, and put every piece of state where it was."""

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from safetensors.torch import load as load_safetensors
from torch import Tensor

from rlhf.checkpoint import commit
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.errors import DamagedCheckpoint
from rlhf.checkpoint.layout import CARRIED, CONFIG, DRIVER_STATE, REFERENCE, rank_file, scan, set_aside_dirs
from rlhf.checkpoint.manifest import Manifest, read_manifest, share_of_files, verify_files
from rlhf.checkpoint.rng import seed_everything, set_rng_state
from rlhf.checkpoint.snapshot import HF_FOLDER, Role, RunState
from rlhf.checkpoint.tensors import INDEX, Pieces, TensorReader
from rlhf.config import Config
from rlhf.config.compare import check_resume
from rlhf.config.files import from_yaml
from rlhf.config.schema import SETTINGS
from rlhf.errors import UserError

log = logging.getLogger(__name__)


def find_intact(run_dir: Path, coordinator: Coordinator, source: Path | None = None) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose every byte is as committed; damaged newer ones are set aside and reported. Collective.

    `source` is the checkpoint that the run was forked from, the last resort. Returns None only for a run directory that never held a
    checkpoint. Raises UserError when all there were are damaged: a run must never start again at step 0 silently.
    """
    stuck = []
    for path in coordinator.on_leader(lambda: scan(run_dir)):
        try:
            return path, verify_together(path, coordinator)
        except DamagedCheckpoint as error:
            if not coordinator.on_leader(partial(_set_aside, path, error)):
                stuck.append(path)
    if source is not None:
        try:
            return source, verify_together(source, coordinator)
        except DamagedCheckpoint as error:
            raise UserError(f"trainer.resume_from_path cannot be used: {error}. Name another checkpoint.") from error
    if damaged := coordinator.on_leader(lambda: stuck + set_aside_dirs(run_dir, "damaged")):
        names = ", ".join(path.name for path in damaged)
        raise UserError(
            f"Every checkpoint in {run_dir} is damaged ({names}), and the run will not start again at step 0 by itself. "
            "Restore one from a backup, or start anew with trainer.overwrite=true or another trainer.experiment_name."
        )
    return None


def _set_aside(path: Path, damage: DamagedCheckpoint) -> bool:
    try:
        kept = commit.set_aside(path, "damaged")
    except OSError as error:
        # On a disk that fails a rename may fail like the reads. What matters is that the older checkpoint is used.
        log.error("%s. It cannot be set aside (%s); falling back to the checkpoint before it.", damage, error)
        return False
    log.error("%s. It was set aside as %s; falling back to the checkpoint before it.", damage, kept.name)
    return True


def verify_together(path: Path, coordinator: Coordinator) -> Manifest:
    """Verify a checkpoint, its files shared out among the ranks; raises DamagedCheckpoint on every rank. Collective."""
    manifest = coordinator.on_leader(lambda: read_manifest(path))
    mine = share_of_files(manifest, coordinator.rank, coordinator.world_size)
    found = coordinator.everywhere(lambda: verify_files(path, manifest, mine))
    if problems := [line for lines in found for line in lines]:
        raise DamagedCheckpoint(f"{path} is damaged: " + "; ".join(problems))
    return manifest


def check_compatible(
    path: Path,
    manifest: Manifest,
    config: Config,
    fingerprints: Mapping[str, str],
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
    check_resume(from_yaml((path / CONFIG).read_text()), config)
    if moving_reference and f"{REFERENCE}/{INDEX}" not in manifest.files:
        raise UserError(
            f"ref.update_freq={config.ref.update_freq} asks for a reference policy that moves, but {path} has none ({REFERENCE}): "
            "it was saved by a run whose reference was frozen. Set ref.update_freq=null to continue that run, or start anew with "
            "trainer.overwrite=true or another trainer.experiment_name."
        )
    if changes := _other_files(path, manifest, config, fingerprints):
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


def load_state(
    path: Path,
    manifest: Manifest,
    state: RunState,
    load_contents: list[str],
    seed: int,
    rank: int,
    world_size: int,
) -> None:
    """Put everything of `state` and this rank's generators where a verified checkpoint has them; in place, so that it can be repeated.

    Parts that the checkpoint does not know start at their beginning, with a warning.
    """
    for name, role in state.roles.items():
        if name not in manifest.roles:
            raise UserError(f"{path} has no {name}; it holds {', '.join(manifest.roles)}.")
        _load_role(path, manifest, name, role, load_contents)
    if state.reference is not None:
        reader = TensorReader.of_component(path / REFERENCE)
        _load(reader, state.reference.pieces(), path, "reference weights", "model.path")
    if state.carried is not None:
        state.carried.load_tensors(_carried(path, manifest, rank, world_size))
    elif manifest.in_folder(CARRIED) and rank == 0:
        log.warning("%s has samples carried over to later steps; this run does not carry any, they are dropped.", path)
    saved = json.loads((path / DRIVER_STATE).read_text())
    state.driver.load_state_dict(saved)
    for name, part in state.parts.items():
        if name not in saved and rank == 0:
            log.warning("%s has no state of %s, which starts at its beginning.", path, name)
        part.load_state_dict(saved[name] if name in saved else json.loads(state.initial_parts[name]))
    # Last: nothing that is loaded may move the generators.
    if "extra" in load_contents:
        _load_rng(path, manifest, seed, rank)


def _load_role(path: Path, manifest: Manifest, name: str, role: Role, load_contents: list[str]) -> None:
    setting = "critic.path" if name == "critic" else "model.path"
    if "model" in load_contents:
        _load(TensorReader.of_component(path / name / "model"), role.model_pieces(), path, f"{name}'s weights", setting)
    elif "hf_model" in load_contents:
        # By the manifest, not by what lies there: only those files were verified.
        files = [f for f in map(PurePosixPath, manifest.files) if f.parent == PurePosixPath(name, HF_FOLDER)]
        weights = [f.name for f in files if f.suffix == ".safetensors"]
        reader = TensorReader.of_whole_tensors(path / name / HF_FOLDER, weights)
        _load(reader, role.model_pieces(), path, f"{name}'s weights", setting)
    if "optimizer" in load_contents:
        reader = TensorReader.of_component(path / name / "optimizer")
        _load(reader, role.optimizer_pieces(), path, f"{name}'s optimizer", setting)
    if "extra" in load_contents:
        role.load_extra_state(json.loads((path / name / "extra" / "lr_scheduler.json").read_text()))


def _load(reader: TensorReader, pieces: Pieces, path: Path, what: str, setting: str) -> None:
    if mismatches := reader.mismatches(pieces):
        shown = "; ".join(mismatches[:5]) + (f"; and {len(mismatches) - 5} more" if len(mismatches) > 5 else "")
        raise UserError(f"{what} in {path} are of another architecture than {setting}: {shown}.")
    reader.read_into(pieces)


def _carried(path: Path, manifest: Manifest, rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """What this rank takes over of the tensors that the ranks of the save carried: its own, and at another world size every W-th."""
    names = [f"{CARRIED}/{rank_file(saved)}" for saved in range(rank, manifest.world_size, world_size)]
    return [_tensors(path / name) for name in names if name in manifest.files]


def _tensors(path: Path) -> dict[str, Tensor]:
    # From bytes: nothing keeps a view into a published file.
    return {name: tensor.clone() for name, tensor in load_safetensors(path.read_bytes()).items()}


def _load_rng(path: Path, manifest: Manifest, seed: int, rank: int) -> None:
    name = f"rng/{rank_file(rank)}"
    if name in manifest.files:
        set_rng_state(_tensors(path / name))
        return
    log.warning(
        "%s was saved by %d ranks and has no RNG state for rank %d; seeded afresh.", path, manifest.world_size, rank
    )
    seed_everything(seed + manifest.step, rank)
