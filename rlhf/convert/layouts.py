"""Lists the known layouts and opens a checkpoint with the first layout that recognises its folder."""

import importlib
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from rlhf.errors import UserError, did_you_mean, nearest
from rlhf.models.hf.source import Origin, TensorSource
from rlhf.storage.layout import scan, step_of

AUTO = "auto"
MOST_ROLES = 100
"""Maximum number of subfolders searched for a model; a step's folder has few."""
OTHER_ROLES = ("critic", "ref")
"""Roles of a native checkpoint that need `--role`."""


class Layout(Protocol):
    """Interface of the modules `layout_...`, each of which reads one layout."""

    NAME: str

    def recognises(self, origin: Origin) -> bool:
        """Return whether the folder has this layout, from names and small files alone."""
        ...

    def open_source(self, origin: Origin) -> TensorSource:
        """Open the checkpoint. Raises UserError that names the option to set or the missing file."""
        ...


@dataclass(frozen=True)
class LayoutEntry:
    """A layout of the table: its name for `--backend`, its module, and the files that identify it."""

    backend: str
    module: str
    known_by: str
    tagged: bool = False
    """Whether a folder can have several saves; `--tag` then selects a save."""

    def load(self) -> Layout:
        module: Any = importlib.import_module(self.module)
        return module


LAYOUTS: tuple[LayoutEntry, ...] = (
    LayoutEntry("native", "rlhf.checkpoint.export.layout_native", "manifest.json, or a folder global_step_N with it"),
    # Try DeepSpeed before trainer and huggingface, which recognise the same folder: only DeepSpeed's files have the
    # moments and the float32 weights.
    LayoutEntry("deepspeed", "rlhf.convert.deepspeed.layout_deepspeed", "TAG/*_model_states.pt", tagged=True),
    # Try Megatron before dcp, which also recognises a megatron-core folder.
    LayoutEntry(
        "megatron",
        "rlhf.convert.megatron.layout_torch_dist",
        "metadata.json of megatron-core, with .metadata",
        tagged=True,
    ),
    LayoutEntry(
        "dcp",
        "rlhf.convert.dcp.layout_dcp",
        ".metadata of torch.distributed.checkpoint, in the folder or in step-N",
        tagged=True,
    ),
    LayoutEntry("trainer", "rlhf.convert.huggingface.layout_trainer", "trainer_state.json or adapter_config.json"),
    LayoutEntry(
        "huggingface",
        "rlhf.convert.huggingface.layout_huggingface",
        "model.safetensors or pytorch_model.bin, or their index.json",
    ),
    LayoutEntry("fsdp", "rlhf.convert.fsdp.layout_fsdp", "model_world_size_W_rank_R.pt, or a folder actor with it"),
    LayoutEntry("megatron", "rlhf.convert.megatron.layout_megatron", "mp_rank_XX_YYY/model_states.pt", tagged=True),
)
"""The layouts, in the order in which `open_source` tries them."""


def backends() -> list[str]:
    return [AUTO, *dict.fromkeys(entry.backend for entry in LAYOUTS)]


def check_folder(path: Path) -> None:
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {problem}. Give the folder of a checkpoint.")


def open_source(origin: Origin, backend: str = AUTO) -> TensorSource:
    """Open a checkpoint with the layout `backend`, or for `auto` with the first layout that recognises the folder.
    Raises UserError for an unrecognised folder, a missing folder, and an unknown backend."""
    if backend not in backends():
        near = did_you_mean(nearest(backend, backends()))
        raise UserError(f"--backend={backend} is unknown. Give one of {', '.join(backends())}.{near}")
    check_folder(origin.path)
    candidates = [entry for entry in LAYOUTS if backend in (AUTO, entry.backend)]
    for entry in candidates:
        if entry.load().recognises(origin):
            return _open(entry, origin)
    if roles := _roles_in(origin, candidates):
        raise UserError(
            f"{origin.path} has no role {origin.role}; it has {', '.join(roles)}. Set --role, or give a role's folder."
        )
    for step in scan(origin.path):
        if _is_known(replace(origin, path=step), candidates):
            raise UserError(f"{origin.path} contains the steps of another trainer. Give one step, such as {step}.")
    # Let the selected layout raise its own error, which names the missing file.
    if backend != AUTO and len(candidates) == 1:
        return _open(candidates[0], origin)
    if within := _checkpoint_around(origin, candidates):
        raise UserError(f"{origin.path} is a part of the checkpoint {within}. {_role_hint(origin, within)}")
    known_by = "; ".join(f"{entry.known_by} ({entry.backend})" for entry in candidates)
    raise UserError(f"{origin.path} contains no checkpoint of a known layout. Looked for: {known_by}.")


def _is_known(origin: Origin, candidates: list[LayoutEntry]) -> bool:
    return any(entry.load().recognises(origin) for entry in candidates)


def _checkpoint_around(origin: Origin, candidates: list[LayoutEntry]) -> Path | None:
    """Return the checkpoint around the folder `origin`, such as `global_step_N` around `global_step_N/actor`."""
    parents = [path for path in origin.path.absolute().parents[:2] if step_of(path) is not None]
    return next((path for path in parents if _is_known(replace(origin, path=path), candidates)), None)


def _role_hint(origin: Origin, within: Path) -> str:
    part = origin.path.absolute().relative_to(within).parts[0]
    return f"Give {within}" + (f" and --role {part}." if part in OTHER_ROLES and part != origin.role else ".")


def _roles_in(origin: Origin, candidates: list[LayoutEntry]) -> list[str]:
    """Return the roles in a step folder of verl: its folders that a layout recognises."""
    names = sorted(path.name for path in islice(origin.path.iterdir(), MOST_ROLES) if path.is_dir())
    return [name for name in names if _is_known(replace(origin, role=name), candidates)]


def _open(entry: LayoutEntry, origin: Origin) -> TensorSource:
    if origin.tag is not None and not entry.tagged:
        raise UserError(
            f"--tag={origin.tag} selects one of several saves in a folder, but {origin.path} has one save (layout "
            f"{entry.backend}). Give the folder of the save, without --tag."
        )
    return entry.load().open_source(origin)
