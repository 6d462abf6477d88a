"""Tensors in folders of torch.distributed.checkpoint, read in ranges."""

import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata, Metadata, MetadataIndex

from rlhf.convert.dcp.dcp_files import DcpFolder
from rlhf.convert.dcp.dcp_safetensors import DcpSafetensors
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint

TENSORS = {
    "cube": torch.arange(2 * 4 * 6.0).view(2, 4, 6),
    "matrix": torch.arange(4 * 6.0).view(4, 6).bfloat16(),
    "vector": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save `TENSORS` and one object with torch."""
    dcp.save({**TENSORS, "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def change(folder: Path, edit: Callable[[Metadata], None]) -> None:
    """Edit `.metadata`."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    edit(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def in_chunks(folder: Path, name: str, pieces: list[tuple[tuple[int, ...], Tensor]]) -> None:
    """Store a tensor in chunks, as several ranks save it; `pieces` are each chunk's offsets and content."""
    for number, (_, tensor) in enumerate(pieces):
        torch.save(tensor, folder / f"{name}_{number}.distcp")

    def edit(found: Metadata) -> None:
        chunks = [ChunkStorageMetadata(torch.Size(place), tensor.shape) for place, tensor in pieces]
        found.state_dict_metadata[name].chunks = chunks
        for index in [index for index in found.storage_data if index.fqn == name]:
            info = found.storage_data.pop(index)
        for number, (place, _) in enumerate(pieces):
            file = f"{name}_{number}.distcp"
            made = type(info)(file, 0, (folder / file).stat().st_size)
            found.storage_data[MetadataIndex(name, place)] = made

    change(folder, edit)


def assert_read(folder: Path) -> None:
    """Check reads of every tensor, whole and in ranges that do not end at borders of chunks."""
    found = DcpFolder(folder)
    assert found.objects == ["step"]
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        flat = tensor.reshape(-1)
        assert torch.equal(found.read(name, 0, len(flat)), flat)
        for start in range(len(flat)):
            assert torch.equal(found.read(name, start, min(start + 7, len(flat))), flat[start : start + 7]), name


def test_whole_tensors_are_read_in_ranges(folder: Path) -> None:
    """The tensors are stored as one rank saves them."""
    assert_read(folder)


def test_chunks_of_rows_columns_and_blocks_are_put_together(folder: Path) -> None:
    """The chunks are those that ranks of fully sharded, tensor and pipeline parallel runs save."""
    cube, matrix, vector = TENSORS["cube"], TENSORS["matrix"], TENSORS["vector"]
    blocks = [(a, b, c) for a in (0, 1) for b in (0, 2) for c in (0, 3)]
    in_chunks(folder, "cube", [((a, b, c), cube[a : a + 1, b : b + 2, c : c + 3].clone()) for a, b, c in blocks])
    in_chunks(folder, "matrix", [((0, 4), matrix[:, 4:].clone()), ((0, 0), matrix[:, :4].clone())])
    in_chunks(folder, "vector", [((0,), vector[:3].clone()), ((3,), vector[3:].clone())])
    assert_read(folder)
    in_chunks(folder, "cube", [((0, 0, 3), cube[:, :, 3:].clone()), ((0, 0, 0), cube[:, :, :3].clone())])
    assert_read(folder)


def any_info(found: Metadata) -> Any:
    """Return an entry of `storage_data`."""
    return next(iter(found.storage_data.values()))


class _Runs:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def remove_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def remove_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def cut_metadata(folder: Path) -> None:
    os.truncate(folder / ".metadata", 200)


def cut_file(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 2000)


def run_code(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs()))


def lead_elsewhere(folder: Path) -> None:
    change(folder, lambda found: setattr(any_info(found), "relative_path", "../other"))


def compress(folder: Path) -> None:
    change(folder, lambda found: setattr(any_info(found), "transform_descriptors", ["zstd"]))


def overlap(folder: Path) -> None:
    """Store one half of a tensor twice, and the other half never."""
    half = TENSORS["cube"][:1].clone()
    in_chunks(folder, "cube", [((0, 0, 0), half), ((0, 0, 0), half)])


def lie_beyond(folder: Path) -> None:
    in_chunks(folder, "cube", [((1, 0, 0), TENSORS["cube"])])


def claim_more(folder: Path) -> None:
    """Claim a chunk with a billion parts that are not contiguous."""

    def edit(found: Metadata) -> None:
        entry = found.state_dict_metadata["cube"]
        entry.size, entry.chunks[0].sizes = torch.Size([1 << 30, 4, 6]), torch.Size([1 << 30, 2, 6])

    change(folder, edit)


def point_before(folder: Path) -> None:
    change(folder, lambda found: setattr(any_info(found), "offset", -40))


def name_a_number(folder: Path) -> None:
    change(folder, lambda found: setattr(any_info(found), "relative_path", 7))


def name_no_type(folder: Path) -> None:
    change(folder, lambda found: setattr(found.state_dict_metadata["cube"].properties, "dtype", "float32"))


def lose_chunks(folder: Path) -> None:
    change(folder, lambda found: delattr(found.state_dict_metadata["cube"], "chunks"))


def pipe(folder: Path) -> None:
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")


def ask_for_memory(folder: Path) -> None:
    """Use a memo index so high that Python's unpickler would allocate 4 GiB."""
    (folder / ".metadata").write_bytes(b"\x80\x02Nr" + (1 << 28).to_bytes(4, "little") + b".")


def ask_for_bytes(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.")


def change_torch(folder: Path) -> None:
    """Set an attribute of a class that is on the list of allowed names."""
    (folder / ".metadata").write_bytes(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x07\x00\x00\x00changedK\x01stb."
    )


def change_a_constant_of_torch(folder: Path) -> None:
    """Set the value of a member of an enumeration that is on the list of allowed names."""
    (folder / ".metadata").write_bytes(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
        b"K\x00\x85R}X\x07\x00\x00\x00_value_K\x07sb."
    )


def lose_chunk(folder: Path) -> None:
    in_chunks(folder, "cube", [((0, 0, 0), TENSORS["cube"][:1].clone())])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_file, "lacks __0_0.distcp, which .metadata lists"),
        (remove_metadata, ".metadata cannot be read .*finished save"),
        (cut_metadata, ".metadata is truncated"),
        (cut_file, "__0_0.distcp"),
        (run_code, r"\.metadata uses posix.system"),
        (lead_elsewhere, r"lists a file outside the folder: \.\./other"),
        (compress, "is compressed"),
        (lose_chunk, "does not list all parts of cube"),
        (overlap, "does not list all parts of cube"),
        (lie_beyond, r"a part of cube, .* at \(1, 0, 0\), is outside of"),
        (claim_more, "cube has the shape .*, but .* bytes"),
        (point_before, "does not have torch's structure: .*negative"),
        (name_a_number, "does not have torch's structure"),
        (name_no_type, "does not have torch's structure"),
        (lose_chunks, "does not have torch's structure"),
        (pipe, "is not a regular file"),
        (ask_for_bytes, "is truncated, or not metadata"),
        (change_torch, "sets attributes of .*Metadata"),
        (change_a_constant_of_torch, "sets attributes of .*_MEM_FORMAT_ENCODING"),
    ],
)
def test_a_broken_folder_gets_one_line(
    folder: Path, spoil: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says what is wrong, and where."""
    monkeypatch.chdir(folder)
    spoil(folder)
    with pytest.raises((UserError, DamagedCheckpoint), match=message) as error:
        DcpFolder(folder).read("cube", 0, 48)
    assert "\n" not in str(error.value)
    assert not (folder / "ran").exists()
    assert not hasattr(Metadata, "changed")
    assert _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value == 0


def test_a_metadata_takes_no_more_memory_than_it_has(folder: Path) -> None:
    """A high memo index must not make the unpickler allocate memory."""
    ask_for_memory(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedCheckpoint):
        DcpFolder(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


@pytest.mark.parametrize(
    ("places", "offsets", "message"),
    [
        ({"x": {"saved_offsets": [1, 0]}}, [0, 24], "lacks parts of x"),  # one row of the whole is missing
        ({"x": {"saved_offsets": ["a", 0]}}, [0, 24], "does not list the offsets of x"),
        ({"x": 5}, [0, 24], "does not list the offsets of x"),
        (["x"], [0, 24], "does not list the offsets of x"),
        ({"x": {"saved_offsets": [0]}}, [0, 24], "offsets .* do not fit its shape"),
        ({"x": {"saved_offsets": [0, 0]}}, [0, 12], "does not fit its shape"),
    ],
)
def test_forged_safetensors_offsets_are_damage(tmp_path: Path, places: Any, offsets: list[int], message: str) -> None:
    """The files lie about their tensors' offsets or lengths."""
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": offsets}
    header = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(places)}, "x": entry}
    text = json.dumps(header).encode()
    file = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    with pytest.raises(DamagedCheckpoint, match=message):
        DcpSafetensors(tmp_path).read("x", 0, 9)


def test_runs_of_a_long_row_are_read_alone(folder: Path) -> None:
    """Megatron's flattened tensors have few long rows. A read of some elements needs only the runs with them."""
    cube = TENSORS["cube"]
    runs: list[tuple[tuple[int, ...], Tensor]] = [
        ((i, j, k), cube[i : i + 1, j : j + 1, k : k + 3].clone()) for i in range(2) for j in range(4) for k in (0, 3)
    ]
    in_chunks(folder, "cube", runs)
    assert_read(folder)
    found = DcpFolder(folder)
    (folder / "cube_1.distcp").unlink()
    assert torch.equal(found.read("cube", 0, 3), cube.reshape(-1)[:3])
    with pytest.raises(DamagedCheckpoint, match=r"cube_1\.distcp is missing"):
        found.read("cube", 0, 4)
