import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from rlhf.storage import shards as storage_shards
from rlhf.storage.boxes import Box, range_box
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_file
from rlhf.storage.hashing import BLOCK
from rlhf.storage.index_rows import rows_of
from rlhf.storage.layout import INDEX, rank_file
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.shard_index import FileShards, Piece, ShardIndex, hash_of_table, merge_shares
from rlhf.storage.shards import DTYPE_NAMES, Shard, TensorReader, safetensors_chunks, tensor_table, write_shards
from tests.support.checkpoints import equal_bits, files_of
from tests.support.cuts import cut
from tests.support.hashes import hash_file

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
dtypes = st.sampled_from(list(DTYPE_NAMES))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern of the type, NaNs included."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (count,), generator=generator).bool().view(shape)
    data = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def write_all(folder, ranks: list[dict[str, Shard]]) -> None:
    shares = [write_shards(folder, "model", rank_file(rank), shards)[1] for rank, shards in enumerate(ranks)]
    write_file(folder, f"model/{INDEX}", [merge_shares(tensor_table(ranks[0]), shares)])


def files_below(folder) -> CheckedFiles:
    """Return the files of a folder with the sizes and hashes that a manifest written now would have."""
    found = {name: hash_file(folder / name) for name in files_of(folder)}
    return CheckedFiles(folder, {name: {"size": size, "xxh3_128": hashes} for name, (size, hashes) in found.items()})


def as_shard(tensor: torch.Tensor, box: Box) -> Shard:
    """Return the part `box` of a whole tensor as a shard in separate memory."""
    part = Shard(tuple(tensor.shape), box.offsets, torch.empty(box.sizes, dtype=tensor.dtype))
    return replace(part, local=part.cut(tensor).clone())


@pytest.mark.parametrize("landing", [16, storage_shards.LANDING_BYTES])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), tensors=st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4))
def test_any_split_reads_back_as_any_other_split(tmp_path_factory, landing, data, tensors):
    """Splits are by rows, columns, both, or ranges of the flattened tensor, on any number of ranks. Memory may have
    room for only a few elements at a time."""
    folder = tmp_path_factory.mktemp("split")
    whole = {f"t{i}": random_tensor(shape, dtype, i) for i, (shape, dtype) in enumerate(tensors)}
    written = {name: cut(data, tuple(tensor.shape), tensor.numel()) for name, tensor in whole.items()}
    ranks: list[dict[str, Shard]] = [{} for _ in range(max(map(len, written.values())))]
    for name, boxes in written.items():
        for rank, own in enumerate(ranks):
            own[name] = as_shard(whole[name], boxes[rank] if rank < len(boxes) else range_box(0, 0))
    write_all(folder, ranks)

    for name, tensor in whole.items():
        boxes = cut(data, tuple(tensor.shape), tensor.numel())
        for rank, box in enumerate(boxes):
            reader = TensorReader.of_component(files_below(folder), "model", rank, len(boxes))
            expected = as_shard(tensor, box)
            # The read must overwrite all old content.
            shard = replace(expected, local=random_tensor(tuple(expected.local.shape), tensor.dtype, 99))
            assert not [line for line in reader.mismatches({name: shard}) if "only in the checkpoint" not in line]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(storage_shards, "LANDING_BYTES", landing)
                reader.read_into({name: shard})
            assert equal_bits(shard.local, expected.local)


def test_ranks_read_columns_of_the_blocks_that_they_name_and_no_others(tmp_path):
    """Two ranks each wrote half of the columns in several blocks. A read that covers columns of
    both halves needs both files, other reads only one."""
    rows, columns = 3 * BLOCK // 64, 16
    tensor = torch.arange(rows * columns, dtype=torch.int64).view(rows, columns)
    halves = [Box((0, 0), (rows, columns // 2)), Box((0, columns // 2), (rows, columns // 2))]
    write_all(tmp_path, [{"w": as_shard(tensor, half)} for half in halves])
    for box, read in (
        (Box((rows // 2, 0), (rows // 2, columns)), {0: {1, 2, 3}, 1: {1, 2, 3}}),
        (Box((0, 1), (rows, 3)), {0: {0, 1, 2, 3}}),
        (range_box(0, 4), {0: {0}}),
        (range_box(0, 12), {0: {0}, 1: {0}}),
    ):
        reader = TensorReader.of_component(files := files_below(tmp_path), "model")
        shard = as_shard(torch.zeros_like(tensor), box)
        assert reader.blocks({"w": shard}) == {f"model/{rank_file(n)}": blocks for n, blocks in read.items()}
        files.checked.clear()
        reader.read_into({"w": shard})
        assert equal_bits(shard.local, as_shard(tensor, box).local)
        assert {name: found for name, found in files.checked.items() if INDEX not in name} == {
            f"model/{rank_file(n)}": blocks for n, blocks in read.items()
        }


def test_damage_in_a_block_of_columns_is_found(tmp_path):
    rows = 3 * BLOCK // 32
    tensor = torch.zeros(rows, 8)
    boxes = [Box((r, c), (rows // 2, 4)) for r in (0, rows // 2) for c in (0, 4)]
    write_all(tmp_path, [{"w": as_shard(tensor, box)} for box in boxes])
    files = files_below(tmp_path)
    path = tmp_path / "model" / rank_file(3)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for box, damaged in ((Box((0, 0), (rows, 4)), False), (Box((rows - 1, 3), (1, 2)), True), (boxes[3], True)):
        reader = TensorReader.of_component(files, "model")
        if damaged:
            with pytest.raises(DamagedCheckpoint, match=rank_file(3)):
                reader.read_into({"w": as_shard(tensor, box)})
        else:
            reader.read_into({"w": as_shard(tensor, box)})


def test_an_index_of_rows_is_as_large_as_the_ranges_are(tmp_path):
    """A contiguous shard takes one row of three numbers; another shard takes one row per dimension."""
    tensor = torch.zeros(4, 6, 2)
    for box, rows in ((Box((1, 0, 0), (3, 6, 2)), 1), (Box((1, 2, 0), (1, 2, 2)), 1), (Box((0, 2, 0), (4, 2, 2)), 3)):
        _, share = write_shards(tmp_path, f"{rows}{box}", rank_file(0), {"w": as_shard(tensor, box)})
        assert len(share.rows) == 24 * rows


def test_a_local_part_of_many_dimensions_and_one_that_is_not_contiguous_are_filled_in_place(tmp_path):
    whole = torch.arange(24.0).view(6, 4)
    write_all(tmp_path, [{"w": Shard((6, 4), (0,), whole)}])
    reader = TensorReader.of_component(files_below(tmp_path), "model")
    rows, transposed = torch.zeros(2, 4), torch.zeros(4, 6).T
    reader.read_into({"w": Shard((6, 4), (8,), rows)})
    assert equal_bits(rows, whole[2:4])
    reader.read_into({"w": Shard((6, 4), (0,), transposed)})
    assert torch.equal(transposed, whole)


def test_files_are_valid_safetensors_and_hold_only_what_the_rank_owns(tmp_path):
    weights = {
        "a": Shard((2, 3), (3,), torch.arange(3.0)),
        "half": Shard((2,), (0,), torch.tensor([1.5, -0.0], dtype=torch.bfloat16)),
        "replica": Shard((), (0,), torch.tensor(7), saved_here=False),
        "nothing": Shard((0, 4), (0,), torch.empty(0, 4)),
    }
    written, _ = write_shards(tmp_path, "model", "rank_00001.safetensors", weights)
    assert [file.path for file in written] == ["model/rank_00001.safetensors"]
    with safe_open(tmp_path / written[0].path, framework="pt") as file:
        assert sorted(file.keys()) == ["a", "half"]
        assert equal_bits(file.get_tensor("a"), weights["a"].local)
        assert equal_bits(file.get_tensor("half"), weights["half"].local)


def test_a_rank_that_owns_nothing_writes_no_file(tmp_path):
    written, share = write_shards(tmp_path, "model", "rank_00001.safetensors", {"a": Shard((3,), (3,), torch.empty(0))})
    assert written == []
    assert share.rows == b""
    assert not (tmp_path / "model").exists()


@settings(max_examples=20, deadline=None)
@given(tensors=st.lists(st.tuples(shapes, dtypes), max_size=4))
def test_whole_tensors_are_read_by_safetensors_and_by_the_reader(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("whole")
    whole = {f"t{i}": random_tensor(shape, dtype, i) for i, (shape, dtype) in enumerate(tensors)}
    write_file(folder, "hf/model.safetensors", safetensors_chunks(whole, {"format": "pt"}))
    with safe_open(folder / "hf/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert equal_bits({name: file.get_tensor(name) for name in file.keys()}, whole)  # noqa: SIM118
    reader = TensorReader.of_whole_tensors(files_below(folder), "hf", ["model.safetensors"])
    shards = {n: Shard(tuple(t.shape), (0,), random_tensor(tuple(t.shape), t.dtype, 99)) for n, t in whole.items()}
    assert reader.mismatches(shards) == []
    reader.read_into(shards)
    assert equal_bits({name: shard.local for name, shard in shards.items()}, whole)


def test_whole_tensors_come_from_the_named_files_only(tmp_path):
    for name, value in (("a.safetensors", 1.0), ("b.safetensors", 2.0), ("z.safetensors", 9.0)):
        write_file(
            tmp_path,
            f"hf/{name}",
            safetensors_chunks(
                {name[0]: torch.tensor([value]), **({"a": torch.tensor([8.0])} if name == "z.safetensors" else {})}
            ),
        )
    reader = TensorReader.of_whole_tensors(files_below(tmp_path), "hf", ["a.safetensors", "b.safetensors"])
    assert sorted(reader.tensors) == ["a", "b"]
    a = torch.zeros(1)
    reader.read_into({"a": Shard((1,), (0,), a)})
    assert a.item() == 1.0


TABLE = {"v": ("F32", (3,)), "w": ("F32", (2, 5))}
"""Two tensors; the first is always a single shard."""


def shares(*ranges: tuple[int, int], table: dict = TABLE) -> list[FileShards]:
    """Return the `FileShards` of ranks that have these ranges of `w`."""
    rows = [[(1, range_box(start, stop))] for start, stop in ranges]
    rows[0].insert(0, (0, range_box(0, 3)))
    return [
        FileShards(rank_file(rank), 100, rows_of(of_rank), hash_of_table(table)) for rank, of_rank in enumerate(rows)
    ]


def read_index(folder, content: bytes) -> ShardIndex:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / INDEX).write_bytes(content)
    return ShardIndex(files_below(folder), "model")


def test_shards_are_found_whatever_the_order_of_ranks(tmp_path):
    index = read_index(tmp_path, merge_shares(TABLE, shares((7, 10), (0, 4), (4, 7))))
    assert index.tensors == TABLE
    assert index.counts() == {"v": 1, "w": 3}
    assert index.find({"w": range_box(2, 8), "v": range_box(1, 2)}, 0, 1) == [
        Piece(name, range_box(start, stop), rank_file(rank), position, range_box(start, stop))
        for name, start, stop, rank, position in (
            ("v", 1, 2, 0, 104),
            ("w", 7, 8, 0, 112),
            ("w", 2, 4, 1, 108),
            ("w", 4, 7, 2, 100),
        )
    ]


@pytest.mark.parametrize(
    "ranges",
    [[(0, 4), (5, 10)], [(1, 10)], [(0, 6), (5, 10)], [(0, 10), (0, 10)], [(0, 9)]],
)
def test_merge_refuses_gaps_and_overlaps(ranges):
    with pytest.raises(ValueError, match="the shards of w do not cover its 10 elements"):
        merge_shares(TABLE, shares(*ranges))


def test_merge_refuses_what_is_not_in_a_tensor():
    with pytest.raises(ValueError, match="shards of w outside its 10 elements"):
        merge_shares(TABLE, shares((0, 11)))


@pytest.mark.parametrize("other", [("F16", (2, 5)), ("F32", (5, 2))])
def test_merge_refuses_ranks_that_disagree(other):
    of_0, of_1 = shares((0, 5), (5, 10))
    of_1 = replace(of_1, table=hash_of_table(TABLE | {"w": other}))
    with pytest.raises(ValueError, match="rank 1 has other tensors than rank 0"):
        merge_shares(TABLE, [of_0, of_1])


def test_a_rank_reads_the_rows_of_few_files(tmp_path):
    """In an index of 800 ranks, a rank of 800 reads only its own part. A rank of another number of ranks reads parts
    nearby. Shards in unexpected places are found, too."""
    world, width = 800, 512
    names = [f"t{number:03}" for number in range(width)]
    table = dict.fromkeys(names, ("F32", (world,)))
    shares = [
        FileShards(
            rank_file(rank), 0, rows_of((n, range_box(rank, rank + 1)) for n in range(width)), hash_of_table(table)
        )
        for rank in range(world)
    ]
    index = read_index(tmp_path, merge_shares(table, shares))
    blocks = index._files.blocks(index.path)
    assert len(blocks) == 3
    for rank, of_ranks in ((10, 800), (790, 800), (395, 400), (2, 400)):
        low, high = world * rank // of_ranks, world * (rank + 1) // of_ranks
        index._files.checked.clear()
        pieces = index.find(dict.fromkeys(names, range_box(low, high)), rank, of_ranks)
        assert len(pieces) == width * (high - low)
        assert {piece.file for piece in pieces} == {rank_file(of_file) for of_file in range(low, high)}
        if of_ranks == world:
            assert len(index._files.checked[index.path]) < len(blocks)
    [piece] = index.find({"t007": range_box(400, 401)}, 10, 800)
    assert (piece.file, piece.position) == (rank_file(400), 28)


def hostile(change) -> bytes:
    """An index with a change to its head, as JSON, or to its rows."""
    content = merge_shares(TABLE, shares((0, 4), (4, 10)))
    length = int.from_bytes(content[:8], "little")
    head, rows = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    metadata = {name: json.loads(text) for name, text in head["__metadata__"].items()}
    changed = change(metadata, rows)
    if isinstance(changed, bytes):
        return changed
    head["__metadata__"] = {name: json.dumps(part) for name, part in metadata.items()}
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + rows


def put(column: int, value: int):
    return lambda _, rows: rows.__setitem__(
        slice(24 + 8 * column, 32 + 8 * column), value.to_bytes(8, "little", signed=True)
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda *_: b"",
        lambda *_: bytes(8),
        lambda *_: b"\xff" * 40,
        lambda *_: (2).to_bytes(8, "little") + b"[]",
        lambda *_: (10000).to_bytes(8, "little") + b"[" * 10000,
        lambda m, _: m.pop("files"),
        lambda m, _: m["files"].append(["x", 0, 1]),
        lambda m, _: m["files"].__setitem__(0, ["x", 0, 1 << 70]),
        lambda m, _: m["files"].__setitem__(0, ["x", -1, 2]),
        lambda m, _: m["files"].__setitem__(0, [None, 0, 2]),
        lambda m, _: m["files"].__setitem__(0, ["x", True, 2]),
        lambda m, _: m["files"].__setitem__(0, "x"),
        lambda m, _: m["tensors"].__setitem__("w", ["F32", [1 << 40, 1 << 40]]),
        lambda m, _: m["tensors"].__setitem__("w", ["F32", [-2, -5]]),
        lambda m, _: m["tensors"].__setitem__("w", ["F32", 10]),
        lambda m, _: m["tensors"].__setitem__("w", [["F32"], [10]]),
        lambda m, _: m.__setitem__("tensors", []),
        lambda _, rows: rows.extend(bytes(24)),
        lambda _, rows: rows.pop(),
        put(0, 2),
        put(0, -1),
        put(1, -1),
        put(1, 4),
        put(2, 11),
        put(2, 3),
        put(0, 0),
    ],
)
def test_an_invalid_index_is_damage(tmp_path, change):
    with pytest.raises(DamagedCheckpoint, match=INDEX):
        read_index(tmp_path, hostile(change)).find({"w": range_box(0, 10)}, 0, 1)


def test_a_tensor_that_no_rank_owns_is_an_error(tmp_path):
    ranks = [{"step": Shard((), (0,), torch.tensor(3.0), saved_here=False)} for _ in range(2)]
    with pytest.raises(ValueError, match="the shards of step do not cover its 1 elements"):
        write_all(tmp_path, ranks)


def test_mismatches_of_tensors_are_described_in_words(tmp_path):
    stored = {"same": torch.zeros(2), "gone": torch.zeros(3), "shape": torch.zeros(2, 3), "type": torch.zeros(4)}
    write_all(tmp_path, [{name: Shard(tuple(t.shape), (0,), t) for name, t in stored.items()}])
    here = {
        "same": torch.zeros(2),
        "new": torch.zeros(1),
        "shape": torch.zeros(3, 2),
        "type": torch.zeros(4, dtype=torch.float16),
    }
    reader = TensorReader.of_component(files_below(tmp_path), "model")
    assert reader.mismatches({name: Shard(tuple(t.shape), (0,), t) for name, t in here.items()}) == [
        "gone is only in the checkpoint",
        "new is not in the checkpoint",
        "shape is ('F32', (2, 3)) in the checkpoint, ('F32', (3, 2)) here",
        "type is ('F32', (4,)) in the checkpoint, ('F16', (4,)) here",
    ]


def test_a_file_or_an_index_that_is_too_short_is_an_error_not_garbage(tmp_path):
    write_all(tmp_path, [{"w": Shard((8,), (0,), torch.arange(8.0))}])
    file, index = tmp_path / "model" / rank_file(0), tmp_path / "model" / INDEX
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"model/rank_00000.safetensors: ends before byte \d+"):
        TensorReader.of_component(files_below(tmp_path), "model").read_into({"w": Shard((8,), (0,), torch.zeros(8))})
    file.write_bytes(whole)
    index.write_bytes(index.read_bytes()[:-24] + rows_of([(0, range_box(0, 7))]))
    with pytest.raises(DamagedCheckpoint, match=r"lacks elements of w\[0:8\]"):
        TensorReader.of_component(files_below(tmp_path), "model").read_into({"w": Shard((8,), (0,), torch.zeros(8))})


def test_an_index_that_points_elsewhere_reaches_only_what_the_manifest_has(tmp_path):
    write_all(tmp_path / "in", [{"w": Shard((8,), (0,), torch.arange(8.0))}])
    (tmp_path / "in/model" / rank_file(0)).rename(tmp_path / "out")
    table = {"w": ("F32", (8,))}
    for name in ("../../out", str(tmp_path / "out"), "out"):
        (tmp_path / "in/model" / INDEX).unlink()
        share = FileShards(name, 72, rows_of([(0, range_box(0, 8))]), hash_of_table(table))
        write_file(tmp_path / "in", f"model/{INDEX}", [merge_shares(table, [share])])
        reader = TensorReader.of_component(files_below(tmp_path / "in"), "model")
        with pytest.raises(DamagedCheckpoint, match="not in the manifest"):
            reader.read_into({"w": Shard((8,), (0,), torch.zeros(8))})
