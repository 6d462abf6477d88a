"""Layout `native`: checkpoints of this trainer, from any backend and number of ranks, proven while they are read."""

import logging
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.commit.manifest import Manifest, read_manifest
from rlhf.checkpoint.driver_state import parse_driver_state
from rlhf.checkpoint.interop.native.native_model_files import NativeModelFiles
from rlhf.checkpoint.interop.source import Contents, Origin, TensorInfo, TrainedSoFar
from rlhf.checkpoint.save.snapshot import HF_FOLDER
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hashing import BLOCK
from rlhf.storage.layout import DRIVER_STATE, MANIFEST, REFERENCE, SCHEDULE, scan
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.shards import DTYPES, Shard, TensorReader

NAME = "native"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
REFERENCE_ROLE = "ref"
READ_AHEAD, MOST_AHEAD = 16 << 20, 128 << 20
"""Bytes of whole tensors that are read together, of many ranks' files up to the second: each block of a file is proven
as a whole, so small tensors one by one would read it again and again."""

log = logging.getLogger(__name__)


def recognises(origin: Origin) -> bool:
    """A folder with a manifest, or a run directory with checkpoints."""
    return (origin.path / MANIFEST).is_file() or bool(scan(origin.path))


def open_source(origin: Origin) -> "NativeCheckpoint":
    """The checkpoint, or the newest one of a run directory of which every file is there."""
    folders = [origin.path, *origin.parts]
    if (origin.path / MANIFEST).is_file():
        return NativeCheckpoint(folders, origin)
    names = list(dict.fromkeys(path.name for folder in folders for path in scan(folder)))
    if not names:
        raise UserError(
            f"{origin.path} holds no checkpoint of this trainer ({MANIFEST}, or global_step_N). Give a run directory, "
            "<default_local_dir>/<project>/<experiment>, or a checkpoint in it."
        )
    problems = []
    for name in sorted(names, key=lambda name: -int(name.rpartition("_")[2])):
        try:
            there = [folder / name for folder in folders if (folder / name / MANIFEST).is_file()]
            return NativeCheckpoint(there or [folders[0] / name], origin)
        except DamagedCheckpoint as problem:
            problems.append(str(problem))
            log.warning("%s; the one before it is looked at.", problem)
    raise DamagedCheckpoint("; ".join(problems))


class NativeCheckpoint:
    """One open checkpoint of this trainer, whose files may lie in several folders (`parts` of storage domains)."""

    layout = NAME

    def __init__(self, folders: list[Path], origin: Origin) -> None:
        self.path = folders[0]
        self.manifest = read_manifest(self.path)
        self.files = _files_in(folders, self.manifest)
        self._weights, self._moments = self._readers(origin.role)
        self._model_files: NativeModelFiles | None = None
        self.contents = self._contents(origin)
        self._order = list(self.contents.tensors | self.contents.moments)
        self._place = {name: number for number, name in enumerate(self._order)}
        self._ahead: dict[str, Tensor] = {}
        self._together = min(max(READ_AHEAD, self.manifest.world_size * BLOCK), MOST_AHEAD)

    def _readers(self, role: str) -> tuple[TensorReader, TensorReader | None]:
        """Readers of the weights and, where they were saved, of the moments."""
        manifest = self.manifest
        if role == REFERENCE_ROLE and manifest.in_folder(REFERENCE):
            return TensorReader.of_component(self.files, REFERENCE), None
        if role not in manifest.roles:
            known = [*manifest.roles, *([REFERENCE_ROLE] if manifest.in_folder(REFERENCE) else [])]
            raise UserError(f"{self.path} has no role {role}; it has {', '.join(known)}. Set --role.")
        optimizer = f"{role}/optimizer"
        moments = TensorReader.of_component(self.files, optimizer) if manifest.in_folder(optimizer) else None
        if manifest.in_folder(f"{role}/model"):
            return TensorReader.of_component(self.files, f"{role}/model"), moments
        folder = f"{role}/{HF_FOLDER}"
        whole = [Path(name).name for name in manifest.in_folder(folder) if name.endswith(".safetensors")]
        if not whole:
            raise UserError(
                f"{self.path} has no weights of {role}: checkpoint.contents was {', '.join(manifest.contents)}. Take a "
                "checkpoint with model or hf_model."
            )
        return TensorReader.of_whole_tensors(self.files, folder, whole), moments

    def _contents(self, origin: Origin) -> Contents:
        moments = {} if self._moments is None else _table(self._moments)
        moments = {name: info for name, info in moments.items() if name.rpartition(".")[2] in MOMENTS}
        absent = [] if moments else ["the optimizer's moments: checkpoint.contents had no optimizer"]
        schedule = None
        if (name := f"{origin.role}/{SCHEDULE}") in self.manifest.files:
            document = self.files.document(name)
            schedule = document.get("lr_scheduler") if isinstance(document, dict) else None
        if schedule is None:
            absent.append("the learning rate schedule: checkpoint.contents had no extra")
        state = parse_driver_state(self.files.content(DRIVER_STATE), DRIVER_STATE)
        progress = TrainedSoFar(state["step"], (schedule or {}).get("last_epoch"), schedule)
        folder = origin.model_files
        if folder is None:
            self._model_files = NativeModelFiles(self.path, self.manifest, self.files, origin.role)
            folder = self._model_files.folder
        return Contents(_table(self._weights), moments, progress, folder, absent=absent)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `TensorSource.read`."""
        if name not in self._ahead:
            info = self._info(name)
            if (stop - start) * info.dtype.itemsize >= self._together or (start, stop) != (0, info.numel):
                return self._fetch({name: (start, stop)})[name]
            self._ahead = self._fetch({following: (0, self._info(following).numel) for following in self._batch(name)})
        return self._ahead.pop(name)[start:stop]

    def _info(self, name: str) -> TensorInfo:
        return self.contents.tensors.get(name) or self.contents.moments[name]

    def _batch(self, name: str) -> list[str]:
        """`name` and whole tensors after it, as much as is read together."""
        size, kind = 0, name in self.contents.tensors

        def fits(following: str) -> bool:
            nonlocal size
            size += self._info(following).nbytes
            return size <= self._together and (following in self.contents.tensors) == kind

        return [name, *list(takewhile(fits, self._order[self._place[name] :]))[1:]]

    def _fetch(self, wanted: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
        """Ranges of tensors that are all weights, or all moments."""
        reader = self._weights if next(iter(wanted)) in self.contents.tensors else self._moments
        assert reader is not None
        found = {n: torch.empty(stop - start, dtype=self._info(n).dtype) for n, (start, stop) in wanted.items()}
        try:
            reader.read_into({n: Shard(self._info(n).shape, start, found[n]) for n, (start, _) in wanted.items()})
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{self.path} is damaged: {error}") from None
        return found

    def close(self) -> None:
        """See `TensorSource.close`."""
        self._ahead = {}
        if self._model_files is not None:
            self._model_files.close()


def _table(reader: TensorReader) -> dict[str, TensorInfo]:
    return {name: TensorInfo(shape, DTYPES[dtype]) for name, (dtype, shape) in reader.tensors.items()}


def _files_in(folders: list[Path], manifest: Manifest) -> CheckedFiles:
    """The files of a checkpoint, each below the first of `folders` that has it as the manifest says."""
    files, missing = CheckedFiles(folders[0], manifest.files), list(manifest.files)
    problems: list[str] = []
    for folder in folders:
        if read_manifest(folder) != manifest:
            raise UserError(f"{folder} is a part of another checkpoint than {folders[0]}. Give parts of one.")
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
        parts = " If nodes had disks of their own, give each one's folder." if len(folders) == 1 else ""
        raise DamagedCheckpoint(f"{folders[0]} is not whole: {'; '.join(problems[:3])}{more}.{parts}")
    return files
