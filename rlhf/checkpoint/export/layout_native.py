"""Layout `native`: reads and verifies this trainer's checkpoints, from any backend and number of ranks.

Imports torch only to return tensors: copying weights unchanged needs no torch.
"""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checkpoint.commit.manifest import Manifest, read_manifest
from rlhf.checkpoint.export.native_model_files import NativeModelFiles, base_folder, start_settings
from rlhf.checkpoint.state.driver_state import parse_driver_state
from rlhf.errors import UserError
from rlhf.models.hf.source import Contents, Origin, TrainedSoFar
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hashing import BLOCK
from rlhf.storage.layout import DRIVER_STATE, HF_FOLDER, MANIFEST, REFERENCE, SCHEDULE, scan
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.shard_index import ShardIndex
from rlhf.storage.whole_tensors import WholeTensors

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.checkpoint.export.native_tensors import NativeTensors
    from rlhf.models.hf.adapters import Adapter
    from rlhf.models.hf.source import ReadableTensor

NAME = "native"
KEEP = "keep"
"""Value of `Origin.adapter` that selects the adapter without its base."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
REFERENCE_ROLE = "ref"

log = logging.getLogger(__name__)


def recognises(origin: Origin) -> bool:
    """Return whether `origin` is or contains a folder with a manifest. verl, too, names folders global_step_N."""
    return any((path / MANIFEST).is_file() for path in (origin.path, *scan(origin.path)))


def open_source(origin: Origin) -> "NativeCheckpoint":
    """Open the checkpoint, or the newest complete checkpoint of a run directory."""
    folders = [origin.path, *origin.parts]
    if (origin.path / MANIFEST).is_file():
        return _opened(folders, origin)
    names = list(dict.fromkeys(path.name for folder in folders for path in scan(folder)))
    if not any((folder / name / MANIFEST).is_file() for folder in folders for name in names):
        raise UserError(
            f"{origin.path} has no checkpoint of this trainer ({MANIFEST}, or global_step_N with one). Give a run "
            "directory, <default_local_dir>/<project>/<experiment>, or a checkpoint in it. For other trainers' "
            "checkpoints, use `merge` or `import`."
        )
    problems = []
    for name in sorted(names, key=lambda name: -int(name.rpartition("_")[2])):
        try:
            there = [folder / name for folder in folders if (folder / name / MANIFEST).is_file()]
            return _opened(there or [folders[0] / name], origin)
        except DamagedCheckpoint as problem:
            problems.append(str(problem))
            log.warning("%s; trying the checkpoint before it.", problem)
    raise DamagedCheckpoint("; ".join(problems))


def _opened(folders: list[Path], origin: Origin) -> "NativeCheckpoint":
    try:
        return NativeCheckpoint(folders, origin)
    except (DamagedCheckpoint, UserError) as error:
        raise _of_checkpoint(folders[0], error) from None


def _of_checkpoint(path: Path, error: DamagedCheckpoint | UserError) -> DamagedCheckpoint | UserError:
    if not path.is_dir():
        return DamagedCheckpoint(
            f"{path} was removed while it was read, by its run (checkpoint.max_to_keep) or by prune. Run the same "
            "command again with a checkpoint that stays."
        )
    named = isinstance(error, UserError) or str(path) in str(error)
    return error if named else DamagedCheckpoint(f"{path} is damaged: {error}")


class NativeCheckpoint:
    """Opens one checkpoint of this trainer, whose files may be in several folders (`parts` of storage domains).

    If the weights are `adapted`, they are adapters of a base stored elsewhere. Then `origin.adapter` selects the
    tensors to read: the adapter in peft's form, adapter and base merged, or (None) the stored tensors. `weights` has
    the dtypes and locations of the stored tensors, and needs no torch; `contents` and `read` import torch.
    """

    layout = NAME

    def __init__(self, folders: list[Path], origin: Origin) -> None:
        self.path = folders[0]
        self.manifest = read_manifest(self.path)
        self.files = _files_in(folders, self.manifest)
        self.folder, self.weights = self._weights_of(origin.role)
        optimizer = f"{origin.role}/optimizer"
        self._optimizer = optimizer if self.manifest.in_folder(optimizer) else None
        self._absent = [] if self._optimizer else ["the optimizer's moments: checkpoint.contents had no optimizer"]
        self._progress = self._trained_so_far(origin.role)
        self._given = origin.model_files
        self.adapted = any(".lora_" in name for name in self.weights.tensors)
        self._adapter_form = origin.adapter if self.adapted else None
        self._own = None if self._given else NativeModelFiles(self.path, self.manifest, self.files, origin.role)

    def _weights_of(self, role: str) -> tuple[str, ShardIndex | WholeTensors]:
        manifest = self.manifest
        if role == REFERENCE_ROLE and manifest.in_folder(REFERENCE):
            return REFERENCE, ShardIndex(self.files, REFERENCE)
        if role not in manifest.roles:
            known = [*manifest.roles, *([REFERENCE_ROLE] if manifest.in_folder(REFERENCE) else [])]
            raise UserError(f"{self.path} has no role {role}; it has {', '.join(known)}. Set --role.")
        if manifest.in_folder(folder := f"{role}/model"):
            return folder, ShardIndex(self.files, folder)
        folder = f"{role}/{HF_FOLDER}"
        whole = [Path(name).name for name in manifest.in_folder(folder) if name.endswith(".safetensors")]
        if not whole:
            raise UserError(
                f"{self.path} has no weights of {role}: checkpoint.contents was {', '.join(manifest.contents)}. Use a "
                "checkpoint with model or hf_model."
            )
        return folder, WholeTensors(self.files, folder, whole)

    def _trained_so_far(self, role: str) -> TrainedSoFar:
        schedule: dict[str, Any] | None = None
        steps: dict[str, Any] = {}
        if (name := f"{role}/{SCHEDULE}") in self.manifest.files:
            document = self.files.document(name)
            if isinstance(document, dict):
                schedule, counts = document.get("lr_scheduler"), document.get("steps_taken")
                steps = counts if isinstance(counts, dict) else {}
        if schedule is None:
            self._absent.append("the learning rate schedule: checkpoint.contents had no extra")
        state = parse_driver_state(self.files.content(DRIVER_STATE), DRIVER_STATE, self.manifest.step)
        return TrainedSoFar(state["step"], steps.get("optimizer_step"), schedule)

    @property
    def model_files(self) -> Path:
        """The folder with config and tokenizer, valid until `close`."""
        found = self._given or self._own
        assert found is not None
        return found if isinstance(found, Path) else found.folder

    @cached_property
    def contents(self) -> Contents:
        if self._adapter_form is not None:
            infos = {name: tensor.info for name, tensor in self._adapter_tensors.items()}
            kept = self._adapter.config if self._adapter_form == KEEP else None
            absent = ["the optimizer's moments: they belong to an adapter", *self._absent]
            return Contents(infos, {}, self._progress, self.model_files, adapter=kept, absent=absent)
        tensors = self._components[0].infos
        parts = self._components[1:]
        moments = {n: info for part in parts for n, info in part.infos.items() if n.rpartition(".")[2] in MOMENTS}
        return Contents(tensors, moments, self._progress, self.model_files, absent=self._absent)

    @cached_property
    def _components(self) -> "list[NativeTensors]":
        from rlhf.checkpoint.export.native_tensors import NativeTensors  # imports torch
        from rlhf.storage.shards import TensorReader

        readers = [TensorReader(self.files, self.folder, self.weights)]
        if self._optimizer is not None:
            readers.append(TensorReader.of_component(self.files, self._optimizer))
        return [NativeTensors(reader, self.manifest.world_size * BLOCK) for reader in readers]

    @cached_property
    def _adapter(self) -> "Adapter":
        from rlhf.checkpoint.export.native_adapter import adapter_in  # imports torch

        return adapter_in(
            self.path, self._components[0], start_settings(self.path, self.manifest, self.files), self.model_files
        )

    @cached_property
    def _adapter_tensors(self) -> "Mapping[str, ReadableTensor]":
        if self._adapter_form == KEEP:
            return self._adapter.tensors
        from rlhf.checkpoint.export.native_adapter import merged_into

        return merged_into(base_folder(self.path, self.manifest, self.files, self._given), self._adapter)

    def read(self, name: str, start: int, stop: int) -> "Tensor":
        try:
            if self._adapter_form is not None:
                return self._adapter_tensors[name].read(start, stop)
            return self._components[name not in self.contents.tensors].read(name, start, stop)
        except DamagedCheckpoint as error:
            raise self.damaged(error) from None

    def damaged(self, error: DamagedCheckpoint) -> DamagedCheckpoint | UserError:
        """Return `error` with the checkpoint's path, or an error that the checkpoint was removed while it was read."""
        return _of_checkpoint(self.path, error)

    def close(self) -> None:
        for name in ("_components", "_adapter", "_adapter_tensors"):
            self.__dict__.pop(name, None)
        if self._own is not None:
            self._own.close()


def _files_in(folders: list[Path], manifest: Manifest) -> CheckedFiles:
    """Return the files of a checkpoint, each in the first of `folders` that has the file with the manifest's size."""
    files, missing = CheckedFiles(folders[0], manifest.files), list(manifest.files)
    problems: list[str] = []
    for folder in folders:
        if read_manifest(folder) != manifest:
            raise UserError(
                f"{folder} is a part of another checkpoint than {folders[0]}. Give parts of the same checkpoint."
            )
        found, problems = [], []
        below = CheckedFiles(folder, manifest.files)
        for name in missing:
            try:
                below.check_entry(name)
                found.append(name)
            except DamagedCheckpoint as problem:
                problems.append(str(problem))
        files.find_below(folder, found)
        missing = [name for name in missing if name not in set(found)]
    if missing:
        more = f"; and {len(missing) - 3} more" if len(missing) > 3 else ""
        parts = " If each node had its own disk, give the folders of all disks." if len(folders) == 1 else ""
        raise DamagedCheckpoint(f"{folders[0]} is not complete: {'; '.join(problems[:3])}{more}.{parts}")
    return files
