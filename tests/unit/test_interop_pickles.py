"""Pickles of other tools: some are read, others are rejected with the reason in one line, and no code in them runs."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.convert.deepspeed import deepspeed_files
from rlhf.convert.fsdp import fsdp_files
from rlhf.convert.pickles import StandIn, open_archive, stand_in
from rlhf.convert.stored_tensor import StoredTensor, open_mapping, open_torch_file
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


class Subtle(Evil):
    """Runs code by a function that torch rejects only because it is not on the list of allowed names."""

    def __reduce__(self):
        return eval, (f"open({str(self.marker)!r}, 'w')",)


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def zipped(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """An archive that looks like one of `torch.save`."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in {"version": b"3\n", "byteorder": b"little", **entries}.items():
            archive.writestr(f"archive/{name}", content)
    return path


def with_pickle(path: Path, original: Path, change: tuple[bytes, bytes]) -> Path:
    """A copy of an archive with other bytes in its pickle."""
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert change[0] in content
                content = content.replace(*change)
            new.writestr(entry.filename, content)
    return path


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    weight = torch.arange(24.0).view(4, 6)
    return {"weight": weight, "turned": weight.T, "part": weight[1:3, 2:4], "half": torch.ones(3).bfloat16()}


def test_tensors_are_read_by_ranges_from_where_they_lie(tensors, tmp_path):
    content = OrderedDict(tensors=tensors, rest=[1, ("two", None), {3}])
    found = open_torch_file(saved(tmp_path / "f.pt", content))
    assert found["rest"] == content["rest"]
    for name, tensor in tensors.items():
        place = found["tensors"][name]
        assert isinstance(place, StoredTensor)
        assert (place.shape, place.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(place.read(0, place.numel), tensor.reshape(-1))
        assert torch.equal(place.read(1, 3), tensor.reshape(-1)[1:3])


def test_a_file_within_a_file(tensors, tmp_path):
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    (tmp_path / "f").write_bytes(b"before" + buffer.getvalue() + b"after")
    found = open_torch_file(tmp_path / "f", start=6, size=len(buffer.getvalue()))
    assert torch.equal(found["weight"].read(5, 9), torch.arange(5.0, 9.0))


@pytest.mark.parametrize(("evil", "name"), [(Evil, "posix.system"), (Subtle, "eval")])
def test_a_pickle_that_calls_functions_is_rejected_and_the_function_named(evil, name, tmp_path):
    marker = tmp_path / "ran"
    written = {
        "as_torch_does": saved(tmp_path / "a.pt", {"model": evil(marker)}),
        "newer_pickle": zipped(tmp_path / "b.pt", {"data.pkl": pickle.dumps([evil(marker)], protocol=4)}),
        "bare_pickle": tmp_path / "c.pt",
        "bare_old_pickle": tmp_path / "d.pt",
    }
    written["bare_pickle"].write_bytes(pickle.dumps(evil(marker)))
    written["bare_old_pickle"].write_bytes(pickle.dumps({"x": evil(marker)}, protocol=0))
    for how, path in written.items():
        with pytest.raises(UserError, match=rf"{path.name} uses .*{name}, which is not allowed") as caught:
            open_torch_file(path)
        assert "\n" not in str(caught.value), how
        assert "weights_only" not in str(caught.value), how
    assert not marker.exists()
    pickle.loads(written["bare_pickle"].read_bytes())  # shows that the pickle does run code
    assert marker.exists()


def test_safe_globals_of_torch_do_not_extend_the_allowed_list(tmp_path):
    path = saved(tmp_path / "f.pt", {"x": Fraction(1, 3)})
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([Fraction])  # as some library may
    try:
        with pytest.raises(UserError, match=r"uses fractions\.Fraction"):
            open_torch_file(path)
        assert Fraction in torch.serialization.get_safe_globals()
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_a_stand_in_keeps_the_arguments_of_an_object(tmp_path):
    path = saved(tmp_path / "f.pt", {"path": Path("/a/b"), "x": torch.ones(2)})
    found = open_torch_file(path, [stand_in("pathlib.PosixPath")])
    assert isinstance(found["path"], StandIn)
    assert found["path"].arguments == ("/", "a", "b")
    assert type(found["path"]).__name__ == "PosixPath"


def test_a_file_that_is_not_a_complete_torch_file_is_one_line(tensors, tmp_path):
    whole = saved(tmp_path / "whole.pt", tensors | {"many": torch.arange(5000.0)})
    content = whole.read_bytes()
    torch.save(tensors, tmp_path / "old", _use_new_zipfile_serialization=False)
    entries = {"data.pkl": b"\x80\x02]q\x00.", "data/0": bytes(1 << 20)}
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    bad = {
        "empty": b"",
        "cut": content[: len(content) // 2],
        "cut_at_the_end": content[:-5],
        "without_its_beginning": content[100:],
        "noise": os.urandom(5000),
        "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "html": b"<!DOCTYPE html><html></html>" * 9,
    }
    for name, damaged in bad.items():
        (tmp_path / name).write_bytes(damaged)
    expected = dict.fromkeys(bad, "not an intact torch.save file") | {
        "old": "has the format of torch before 1.6",
        "pipe": "is not a regular file",
        "folder": "is not a regular file",
        "nowhere": "is missing",
        "bomb": "has compressed entries",
        "no_pickle": "not an intact torch.save file",
        "broken_pickle": "EOFError",
        "huge": "",
        "negative": "",
    }
    zipped(tmp_path / "bomb", entries, zipfile.ZIP_DEFLATED)
    zipped(tmp_path / "no_pickle", {"x": b"1"})
    zipped(tmp_path / "broken_pickle", {"data.pkl": b"\x80\x02}q\x00X\xff\xff\xff\x7fabc"})
    # A tensor's 5000 elements become 2 ** 31 - 1 elements, or get an offset before the start of the file.
    with_pickle(tmp_path / "huge", whole, (b"M\x88\x13\x85", b"J\xff\xff\xff\x7f\x85"))
    with_pickle(tmp_path / "negative", whole, (b"QK\x00M\x88\x13\x85", b"QJ\x00\x00\x00\xf0M\x88\x13\x85"))
    for name, message in expected.items():
        with pytest.raises((DamagedCheckpoint, UserError), match=message or None) as caught:
            open_torch_file(tmp_path / name)
        text = str(caught.value)
        assert text.startswith(str(tmp_path / name)), text
        assert "\n" not in text, text
        assert len(text) < 400, text
        assert "weights_only" not in text, text


def test_an_archive_that_claims_more_than_it_has(tmp_path):
    path = zipped(tmp_path / "f.pt", {"data.pkl": b"\x80\x02N.", "data/0": bytes(64)})
    content = bytearray(path.read_bytes())
    # Change the last entry's sizes in the directory at the archive's end.
    at = content.rfind(b"PK\x01\x02")
    content[at + 20 : at + 28] = (1 << 30).to_bytes(4, "little") * 2
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="claims more bytes than it has"), open_archive(path):
        pass


class Lying:
    """Pickles four numbers so that they are unpickled as a tensor with any given `offset`, `size` and `stride`."""

    def __init__(self, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.form = offset, size, stride

    def __reduce__(self):
        four = torch.storage.TypedStorage(
            wrap_storage=torch.arange(4.0).untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (four, *self.form, False, {})


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (20,), (1,)), (3, (2,), (1,)), (100, (4,), (1,)), (0, (4, 2), (2, 1)), (0, (1 << 30, 4), (0, 1))],
)
def test_a_tensor_outside_its_own_storage_is_damage(offset, size, stride, tmp_path):
    """A tensor must not read other tensors' numbers in the file, nor repeat a few of its own without bound."""
    path = saved(tmp_path / "f.pt", {"lying": Lying(offset, size, stride), "other": torch.full((1000,), 7.0)})
    with pytest.raises(DamagedCheckpoint, match=r"lists tensors beyond its end|expands a few numbers"):
        open_torch_file(path)


def test_an_expanded_tensor_is_read(tmp_path):
    place = open_torch_file(saved(tmp_path / "f.pt", torch.arange(4.0).expand(3, 4)))
    assert place.read(0, 12).tolist() == [0.0, 1.0, 2.0, 3.0] * 3


def test_a_file_in_another_byte_order_is_rejected(tmp_path):
    path = saved(tmp_path / "file.pt", torch.arange(4.0))
    other = tmp_path / "big.pt"
    other.write_bytes(path.read_bytes().replace(b"little", b"big   "))
    with pytest.raises(UserError, match="another byte order"):
        open_torch_file(other)


def test_numpy_arrays_in_a_pickle_are_not_created(tmp_path):
    """NumPy's dtypes trust a pickle, which can make them treat the bytes of an array as addresses of objects."""
    state = {"rng": np.random.get_state()}
    for files in (fsdp_files, deepspeed_files):
        path = saved(tmp_path / "f.pt", state | {"weight": torch.ones(2)})
        found = open_mapping(path, files.ALLOWED, "another tool")
        assert isinstance(found["rng"][1], StandIn), files
        assert isinstance(found["weight"], StoredTensor)


@pytest.mark.parametrize("order", ["ahead", "backwards", "all but the last", "columns"])
def test_a_flipped_bit_of_a_tensor_is_seen_while_it_is_read(order, tmp_path):
    """The archive's own checksum reveals the flipped bit, in whatever order the ranges are read."""
    weight = torch.arange(4000.0)
    path = saved(tmp_path / "f.pt", {"other": torch.ones(9), "weight": weight})
    ranges = [(at, at + 100) for at in range(0, 4000, 100)]
    chosen = {
        "ahead": ranges,
        "backwards": ranges[::-1],
        "all but the last": ranges[:-1],
        "columns": [(at + half, at + half + 50) for half in (0, 50) for at in range(0, 4000, 100)],
    }[order]
    whole = [open_torch_file(path)["weight"].read(*each) for each in chosen]
    assert all(torch.equal(part, weight[slice(*each)]) for part, each in zip(whole, chosen, strict=True))
    content = path.read_bytes()
    value = weight[3990:3991].numpy().tobytes()
    assert content.count(value) == 1
    path.write_bytes(content.replace(value, bytes([value[0] ^ 1, *value[1:]])))
    place = open_torch_file(path)["weight"]
    with pytest.raises(DamagedCheckpoint, match=r"f\.pt is damaged: bytes .* CRC-32\. Copy the file again"):
        [place.read(*each) for each in chosen]
    assert torch.equal(open_torch_file(path)["other"].read(0, 9), torch.ones(9))


def test_files_without_checksums_are_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "f.pt", {"weight": torch.arange(50.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(open_torch_file(path)["weight"].read(0, 50), torch.arange(50.0))


def test_a_flipped_bit_in_a_pickle_is_seen_before_it_is_read(tmp_path):
    path = saved(tmp_path / "f.pt", {"weight": torch.arange(50.0)})
    path.write_bytes(path.read_bytes().replace(b"weight", b"weigit"))
    with pytest.raises(DamagedCheckpoint, match=r"data\.pkl does not have the saved checksum\. Copy the file again"):
        open_torch_file(path)


def test_a_damaged_tensor_file_is_not_reported_as_unsafe(tmp_path):
    """Its pickle uses only names that every file of tensors uses."""
    path = tmp_path / "f.pt"
    path.write_bytes(pickle.dumps(OrderedDict(weight=[1, 2])))
    with pytest.raises(DamagedCheckpoint, match=r"f\.pt is not an intact torch\.save file: .*\. Copy the file again"):
        open_torch_file(path)
    path.write_bytes(b"")
    with pytest.raises(
        DamagedCheckpoint, match=r"f\.pt is not an intact torch\.save file: it is empty\. Copy the file again"
    ):
        open_torch_file(path)
