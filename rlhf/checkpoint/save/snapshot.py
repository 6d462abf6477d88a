"""Takes a snapshot of a run: everything that one save writes.

Big tensors are live views of the training state until the save writes them, or a Stager copies them.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from rlhf.checkpoint.state.run_state import RunState
from rlhf.models.hf.hf_writer import HfExport
from rlhf.ranks.rng import rng_state
from rlhf.storage.hf_layout import ADAPTER_CONFIG
from rlhf.storage.layout import CARRIED, CONFIG, DRIVER_STATE, HF_FOLDER, REFERENCE, SCHEDULE, rank_file
from rlhf.storage.shards import Shards
from rlhf.storage.state import TrainState


@dataclass
class Snapshot:
    """This rank's part of a save.

    This rank alone writes `files` (path -> bytes) and `whole_tensors` (path -> tensors of a safetensors file). For
    `components` (folder -> shards), the save adds an index over all ranks. All ranks together write the files of
    `exports` (folder -> export). Shards are live views, except in exports with `is_copy`. `unchanged` maps
    components to a published checkpoint that already has them, bit for bit. The manifest records `metrics`, the
    metrics of the step.
    """

    step: int
    contents: list[str]
    roles: list[str]
    components: dict[str, Shards] = field(default_factory=dict)
    exports: dict[str, HfExport] = field(default_factory=dict)
    whole_tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    unchanged: dict[str, Path] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def nbytes(self, linked: Collection[str] = ()) -> int:
        """Return the bytes that this rank writes, without headers, exports and the components `linked`."""
        written = (component for folder, component in self.components.items() if folder not in linked)
        shards = (p.local for component in written for p in component.values() if p.saved_here)
        whole = (t for tensors in self.whole_tensors.values() for t in tensors.values())
        return sum(t.numel() * t.element_size() for t in [*shards, *whole]) + sum(map(len, self.files.values()))

    def index_rows(self, linked: Collection[str] = ()) -> int:
        written = (component for folder, component in self.components.items() if folder not in linked)
        return sum(len(p.box.sizes) for component in written for p in component.values() if p.saved_here)


def take_snapshot(
    step: int,
    contents: list[str],
    state: RunState,
    config_yaml: str,
    rank: int,
    reference_at: Path | None = None,
    metrics: Mapping[str, float] | None = None,
    hf_dtype: str | None = None,
    hf_adapter: str = "keep",
) -> Snapshot:
    """Collect the state that `contents` names. Collective. `reference_at` is a published checkpoint that has the
    current reference policy; `hf_dtype` and `hf_adapter` are settings of `checkpoint`."""
    snapshot = Snapshot(step, list(contents), sorted(state.roles), metrics=dict(metrics or {}))
    for name, role in state.roles.items():
        if {"model", "hf_model"} & set(contents):
            weights = role.model_shards()
            if "model" in contents:
                snapshot.components[f"{name}/model"] = weights
            if "hf_model" in contents:
                export = _export(role, weights, hf_dtype, hf_adapter)
                snapshot.exports[f"{name}/{HF_FOLDER}"] = export
                small = export.plan.others() if rank == 0 else {}
                snapshot.files |= {f"{name}/{HF_FOLDER}/{file}": content for file, content in small.items()}
        if "optimizer" in contents:
            snapshot.components[f"{name}/optimizer"] = role.optimizer_shards()
        if "extra" in contents and rank == 0:
            snapshot.files[f"{name}/{SCHEDULE}"] = _json(role.extra_state())
    if "extra" in contents:
        snapshot.whole_tensors[f"rng/{rank_file(rank)}"] = rng_state()
    if state.reference is not None and {"model", "hf_model"} & set(contents):
        snapshot.components[REFERENCE] = state.reference.shards()
        if reference_at is not None:
            snapshot.unchanged[REFERENCE] = reference_at
    if state.carried is not None and (carried := state.carried.tensors()):
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in carried.items()}
        snapshot.whole_tensors[f"{CARRIED}/{rank_file(rank)}"] = copies
    if rank == 0:
        states = {name: stateful.state_dict() for name, stateful in state.stateful.items()}
        snapshot.files[DRIVER_STATE] = _json(state.driver.state_dict() | states)
        snapshot.files[CONFIG] = config_yaml.encode()
    return snapshot


def _export(role: TrainState, weights: Shards, dtype: str | None, adapter: str) -> HfExport:
    """Return the export of a role. Collective."""
    files = dict(role.hf_files())
    if ADAPTER_CONFIG not in files:
        return HfExport.of(weights, dtype, role.hf_parts(), files)
    if adapter == "keep":
        return HfExport.of_adapter(weights, dtype, files)
    del files[ADAPTER_CONFIG]
    return replace(HfExport.of(role.merged_shards(), dtype, role.hf_parts(), files), is_copy=True)


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
