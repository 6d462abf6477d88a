"""Plans, writes and verifies the Hugging Face folder of an open checkpoint, in the cheapest way."""

from contextlib import closing
from itertools import islice
from pathlib import Path

from rlhf.checkpoint.commit.output_folder import verify_written
from rlhf.checkpoint.export.layout_native import NativeCheckpoint
from rlhf.models.hf.hf_plan import HfOptions, HfPlan, Progress, plan_as_stored
from rlhf.models.hf.source import TensorSource
from rlhf.storage.boxes import contiguous_runs, layout_of, whole_box
from rlhf.storage.copying import CheckedCopy, RangeCopy
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_file
from rlhf.storage.hf_layout import WeightsFile
from rlhf.storage.safetensors_header import ITEM_BYTES

FILES_AT_A_TIME = 32
"""Weight files open at the same time."""


def hf_work(source: TensorSource, where: Path, options: HfOptions) -> "Computed | Copied":
    """Return a plan that writes a folder from an open checkpoint; raise like `plan_hf_folder`. Errors name the
    checkpoint `where`. `Copied` copies unchanged native weights without torch: importing torch takes longer than
    copying a GB."""
    if isinstance(source, NativeCheckpoint) and not source.adapted:
        plan = plan_as_stored(source.weights.tensors, source.model_files, options)
        if plan is not None:
            return Copied(source, plan)
    return Computed(source, where, options)


class Computed:
    """Writes a folder whose tensors need torch: to convert them, to compare tied copies, or to read another layout."""

    def __init__(self, source: TensorSource, where: Path, options: HfOptions) -> None:
        from rlhf.models.hf.hf_folder import plan_hf_folder

        self.plan, self._source, _ = plan_hf_folder(source, where, options)

    def write(self, folder: Path, progress: Progress = lambda count: None) -> None:
        """Write the folder and read it back; raise DamagedCheckpoint, with the file's name, for a hash mismatch."""
        from rlhf.models.hf.hf_writer import write_hf_folder

        verify_written(folder, write_hf_folder(self._source, self.plan, folder, progress))


class Copied:
    """Copies the bytes of a native checkpoint to a folder and reads each block once."""

    def __init__(self, source: NativeCheckpoint, plan: HfPlan) -> None:
        self._source, self.plan = source, plan

    def write(self, folder: Path, progress: Progress = lambda count: None) -> None:
        files = iter(self.plan.weights)
        while some := list(islice(files, FILES_AT_A_TIME)):
            headers = {file.name: file.header for file in some}
            with closing(CheckedCopy(self._source.files, self._ranges(some), folder, headers)) as copy:
                try:
                    copy.write(progress)
                except DamagedCheckpoint as error:
                    raise self._source.damaged(error) from None
                copy.finish()
        verify_written(folder, [write_file(folder, name, [content]) for name, content in self.plan.others().items()])

    def _ranges(self, files: list[WeightsFile]) -> list[RangeCopy]:
        source, tensors = self._source, self.plan.tensors
        target = {name: (file.name, first) for file in files for name, first in file.first_byte.items()}
        wholes = {name: whole_box(tensors[name][1]) for name in target}
        found = []
        for piece in source.weights.find({name: whole for name, whole in wholes.items() if whole.numel}, 0, 1):
            (path, first), (kind, shape) = target[piece.name], tensors[piece.name]
            width, name = ITEM_BYTES[kind], f"{source.folder}/{piece.file}"
            length, (starts, placed) = contiguous_runs(
                *(layout_of(piece.box, b, shape) for b in (piece.shard, wholes[piece.name]))
            )
            for start, place in zip((piece.position + starts * width).tolist(), placed.tolist(), strict=True):
                found.append(RangeCopy(name, start, start + length * width, path, first + place * width))
        return found
