"""Weights of many ranks become a Hugging Face folder, bit for bit; the export takes the memory of a few blocks."""

import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlhf.checkpoint.state.run_state import RunState
from rlhf.errors import UserError
from rlhf.models.hf import block_plan, hf_writer
from rlhf.models.hf.hf_writer import HfExport, write_exports
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage import files, hf_layout
from rlhf.storage.files import SharedFile
from rlhf.storage.shards import Shard, Shards
from tests.support.checkpoints import (
    PlainRole,
    equal_bits,
    files_of,
    make_checkpointer,
    make_config,
    make_driver,
    run_ranks,
)
from tests.support.thread_ranks import make_coordinator, replaced, run_thread_ranks

BLOCK = 64
FOLDER = "actor/huggingface"
TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.uint8)
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def small(monkeypatch):
    """Make blocks and files a few bytes small."""
    for module in (files, block_plan, hf_writer):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(hf_layout, "SHARD_BYTES", 700)


def whole(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors of several types, with values that rounding changes."""
    generator = torch.Generator().manual_seed(len(shapes))
    values = [100 * torch.rand(shape, generator=generator) for shape in shapes]
    return {f"t{i}": value.to(TYPES[i % len(TYPES)]) for i, value in enumerate(values)}


def held_by(rank: int, tensors: dict[str, torch.Tensor], cuts: list[list[int]]) -> Shards:
    """Return a rank's shards. For each tensor `cuts` has the percentages at which the ranks' parts end.

    Every other matrix is cut by columns.
    """
    shards = {}
    for i, ((name, tensor), ends) in enumerate(zip(tensors.items(), cuts, strict=True)):
        if i % 2 and tensor.dim() == 2 and tensor.dtype != torch.uint8:
            edges = [0, *(tensor.shape[1] * end // 100 for end in sorted(ends)), tensor.shape[1]]
            columns = tensor[:, edges[rank] : edges[rank + 1]].clone()
            shards[name] = Shard(tuple(tensor.shape), (0, edges[rank]), columns)
            continue
        edges = [0, *(tensor.numel() * end // 100 for end in sorted(ends)), tensor.numel()]
        start, stop = edges[rank], edges[rank + 1]
        if tensor.dtype == torch.uint8:  # as a buffer, which every rank has and the first one saves
            shards[name] = Shard(tuple(tensor.shape), (0,), tensor.reshape(-1), saved_here=rank == 0)
        else:
            shards[name] = Shard(tuple(tensor.shape), (start,), tensor.reshape(-1)[start:stop].clone())
    return shards


def export(rank: int, root: Path, shapes, cuts, domains: list[int], dtype: str | None):
    coordinator = Coordinator(make_coordinator()._transport, domains)
    own = root / f"disk{domains[rank]}"
    tensors = whole(shapes)
    done = write_exports(own, {FOLDER: HfExport.of(held_by(rank, tensors, cuts), dtype, {}, {})}, coordinator)
    return None if done is None else done.files


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=2).map(tuple), min_size=1, max_size=8))
    cut = st.lists(st.integers(0, 100), min_size=ranks - 1, max_size=ranks - 1)
    cuts = draw(st.lists(cut, min_size=len(shapes), max_size=len(shapes)))
    domains = draw(st.sampled_from([d for d in DOMAINS if len(d) >= ranks]))[:ranks]
    return shapes, cuts, domains, draw(st.sampled_from([None, *FLOATS]))


DOMAINS = ([0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 2, 3], [0, 0, 2, 2])


@settings(deadline=None, max_examples=60)
@given(cases())
def test_any_split_over_ranks_and_disks_exports_the_same_folder(tmp_path_factory, case):
    shapes, cuts, domains, dtype = case
    root = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        for module in (files, block_plan, hf_writer):
            patch.setattr(module, "BLOCK", BLOCK)
        patch.setattr(hf_layout, "SHARD_BYTES", 700)
        found = run_thread_ranks(len(domains), export, root, shapes, cuts, domains, dtype)
    assert found[1:] == [None] * (len(domains) - 1)
    assert [path.name for path in root.iterdir()] == ["disk0"]
    folder, loaded = root / "disk0", {}
    assert files_of(folder) == {file.path for file in found[0]}
    for file in found[0]:
        content = (folder / file.path).read_bytes()
        blocks = [content[at : at + BLOCK] for at in range(0, len(content), BLOCK)]
        assert (file.size, file.xxh3_128) == (len(content), "".join(map(xxhash.xxh3_128_hexdigest, blocks)))
        loaded |= load_file(folder / file.path)
    expected = {
        name: tensor.to(FLOATS[dtype]) if dtype and tensor.is_floating_point() else tensor
        for name, tensor in whole(shapes).items()
    }
    assert equal_bits(loaded, expected)


def failing(rank: int, root: Path, action: str) -> str:
    """Export while rank 1's disk is full; return this rank's error and its number of failed writes."""
    coordinator, writes = make_coordinator(), []

    def fail(*_: object) -> None:
        writes.append(threading.current_thread())
        raise OSError(errno.ENOSPC, "asked for by the test")

    shapes = [(9, 9), (70,), (50, 2)]
    shards = held_by(rank, whole(shapes), [[40], [50], [60]])
    try:
        if rank == 1:
            with replaced(SharedFile, action, fail):
                write_exports(root, {FOLDER: HfExport.of(shards, None, {}, {})}, coordinator)
        else:
            write_exports(root, {FOLDER: HfExport.of(shards, None, {}, {})}, coordinator)
    except OSError as error:
        return f"{error} {len(writes)}"
    return "nothing"


@pytest.mark.parametrize("action", ["__init__", "write", "sync"])
def test_a_write_error_on_one_rank_ends_the_export_on_all_ranks(tmp_path, small, action):
    messages = run_thread_ranks(2, failing, tmp_path, action, deadline_s=30)
    assert [text.startswith(f"[Errno {errno.ENOSPC}] asked for by the test") for text in messages] == [True, True]
    assert messages[1].endswith(" 1")  # it does not try again


def test_a_tensor_that_no_rank_saves_is_an_error(tmp_path, small):
    shards = {"weight": Shard((10,), (0,), torch.zeros(6))}
    with pytest.raises(ValueError, match="weight do not cover its 10 elements"):
        write_exports(tmp_path, {FOLDER: HfExport.of(shards, None, {}, {})}, make_coordinator())


def test_weights_beyond_float16_are_an_error_with_a_remedy(tmp_path):
    config = make_config(tmp_path)
    config.checkpoint.contents, config.checkpoint.hf_dtype = ["model", "hf_model"], "float16"
    role = PlainRole()
    make_checkpointer(config, role, 1).save(1)
    role.weight[7] = 7e4
    with pytest.raises(UserError, match=r"float16: weight has values beyond 65504.*set checkpoint\.hf_dtype=bfloat16"):
        make_checkpointer(config, role, 2).save(2)
    assert {path.name for path in config.run_dir.iterdir() if path.is_dir()} == {"global_step_1"}
    role.weight[7] = torch.inf  # infinite before the conversion, too
    make_checkpointer(config, role, 2).save(2)


def test_copy_of_the_weights_is_shared_with_the_export_and_counted_once(tmp_path):
    role = PlainRole()
    state = RunState({"actor": role}, make_driver())
    assert {state.copied_bytes(contents) for contents in (["model"], ["hf_model"], ["model", "hf_model"])} == {4000}
    config = make_config(tmp_path)
    config.checkpoint.async_save, config.checkpoint.contents = True, ["model", "hf_model"]
    checkpointer = make_checkpointer(config, role, 1)
    before = role.weight.clone()
    with replaced(hf_writer._BlockWriter, "write", slowly := Slowly(hf_writer._BlockWriter.write)):
        checkpointer.save(1)
        role.weight.zero_()  # training goes on
        slowly.go.set()
        path = checkpointer.finish().path
    assert equal_bits(load_file(path / FOLDER / "model.safetensors"), {"weight": before})
    memory = [tensor.nbytes for tensor in checkpointer._stager._memory.values()]
    assert max(memory) == 4032  # 4000, aligned


class Slowly:
    """A method that waits for `go` before it begins."""

    def __init__(self, original) -> None:
        self.go, self._original = threading.Event(), original

    def __call__(self, *arguments):
        assert self.go.wait(30)
        return self._original(*arguments)


def peak(rank: int, root: Path, nbytes: int) -> tuple[int, int]:
    """Export `nbytes`; return the growth of this process' peak memory, and the size of its weights."""
    coordinator = make_coordinator()
    rows = nbytes // 4 // 2
    tensors = {f"t{i}": torch.ones(rows // 8) for i in range(8)}
    shards = {name: Shard((2 * len(t),), (rank * len(t),), t) for name, t in tensors.items()}
    # The first export imports modules and creates the threads' stacks.
    write_exports(root / "warm", {FOLDER: HfExport.of({"a": replace(shards["t0"])}, "bfloat16", {}, {})}, coordinator)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    write_exports(root, {FOLDER: HfExport.of(shards, "bfloat16", {}, {})}, coordinator)
    return status("VmHWM") - before, rows * 4


def status(name: str) -> int:
    """Return a size from /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def test_memory_of_an_export_does_not_grow_with_the_model(tmp_path):
    """Over gloo, in processes of their own."""
    grown = run_ranks(2, peak, tmp_path, 96 << 20, deadline_s=60, join=tmp_path / "join")
    size = sum(path.stat().st_size for path in tmp_path.glob(f"{FOLDER}/*"))
    assert size > 48 << 20
    assert all(bytes_more < 20 << 20 < weights for bytes_more, weights in grown), grown
