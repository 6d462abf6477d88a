import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_file, write_json
from rlhf.storage.layout import rank_file
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.shards import (
    DTYPE_NAMES,
    INDEX,
    Shard,
    TensorReader,
    merge_indices,
    safetensors_chunks,
    write_shards,
)
from tests.support.checkpoints import equal_bits, files_of
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


def cuts(data: st.DataObject, count: int, parts: int) -> list[tuple[int, int]]:
    """`parts` contiguous ranges, some perhaps empty, that cover range(count)."""
    inner = sorted(data.draw(st.lists(st.integers(0, count), min_size=parts - 1, max_size=parts - 1)))
    edges = [0, *inner, count]
    return list(pairwise(edges))


def write_all(folder, ranks: list[dict[str, Shard]]) -> None:
    parts = [write_shards(folder, "model", rank_file(rank), shards)[1] for rank, shards in enumerate(ranks)]
    write_json(folder, f"model/{INDEX}", merge_indices(parts))


def files_below(folder) -> CheckedFiles:
    """All files of a folder, as a manifest would have them now."""
    found = {name: hash_file(folder / name) for name in files_of(folder)}
    return CheckedFiles(folder, {name: {"size": size, "xxh3_128": hashes} for name, (size, hashes) in found.items()})


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tensors=st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4), writers=st.integers(1, 4))
def test_any_split_reads_back_as_any_other_split(tmp_path_factory, data, tensors, writers):
    folder = tmp_path_factory.mktemp("split")
    whole = {f"t{i}": random_tensor(shape, dtype, i) for i, (shape, dtype) in enumerate(tensors)}
    ranks: list[dict[str, Shard]] = [{} for _ in range(writers)]
    for name, tensor in whole.items():
        flat = tensor.reshape(-1)
        for rank, (start, stop) in enumerate(cuts(data, flat.numel(), writers)):
            ranks[rank][name] = Shard(tuple(tensor.shape), start, flat[start:stop])
    write_all(folder, ranks)

    reader = TensorReader.of_component(files_below(folder), "model")
    for name, tensor in whole.items():
        flat = tensor.reshape(-1)
        for start, stop in cuts(data, flat.numel(), data.draw(st.integers(1, 4))):
            # Any dirt that is there before must be gone.
            shard = Shard(tuple(tensor.shape), start, random_tensor((stop - start,), tensor.dtype, 99))
            assert not [line for line in reader.mismatches({name: shard}) if "only in the checkpoint" not in line]
            reader.read_into({name: shard})
            assert equal_bits(shard.local, flat[start:stop])


def test_a_local_part_of_many_dimensions_and_one_that_is_not_contiguous_are_filled_in_place(tmp_path):
    whole = torch.arange(24.0).view(6, 4)
    write_all(tmp_path, [{"w": Shard((6, 4), 0, whole)}])
    reader = TensorReader.of_component(files_below(tmp_path), "model")
    rows, transposed = torch.zeros(2, 4), torch.zeros(4, 6).T
    reader.read_into({"w": Shard((6, 4), 8, rows)})
    assert equal_bits(rows, whole[2:4])
    reader.read_into({"w": Shard((6, 4), 0, transposed)})
    assert torch.equal(transposed, whole)


def test_files_are_valid_safetensors_and_hold_only_what_the_rank_owns(tmp_path):
    weights = {
        "a": Shard((2, 3), 3, torch.arange(3.0)),
        "half": Shard((2,), 0, torch.tensor([1.5, -0.0], dtype=torch.bfloat16)),
        "replica": Shard((), 0, torch.tensor(7), owner=False),
        "nothing": Shard((0, 4), 0, torch.empty(0, 4)),
    }
    written, _ = write_shards(tmp_path, "model", "rank_00001.safetensors", weights)
    assert [file.path for file in written] == ["model/rank_00001.safetensors"]
    with safe_open(tmp_path / written[0].path, framework="pt") as file:
        assert sorted(file.keys()) == ["a", "half"]
        assert equal_bits(file.get_tensor("a"), weights["a"].local)
        assert equal_bits(file.get_tensor("half"), weights["half"].local)


def test_a_rank_that_owns_nothing_writes_no_file(tmp_path):
    written, share = write_shards(tmp_path, "model", "rank_00001.safetensors", {"a": Shard((3,), 3, torch.empty(0))})
    assert written == []
    assert share["a"]["shards"] == []
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
    shards = {n: Shard(tuple(t.shape), 0, random_tensor(tuple(t.shape), t.dtype, 99)) for n, t in whole.items()}
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
    assert sorted(reader.index) == ["a", "b"]
    a = torch.zeros(1)
    reader.read_into({"a": Shard((1,), 0, a)})
    assert a.item() == 1.0


def share(start: int, stop: int, shape: tuple[int, ...] = (2, 5), dtype: str = "F32") -> dict:
    return {"w": {"dtype": dtype, "shape": list(shape), "shards": [{"file": "f", "start": start, "stop": stop}]}}


def test_merged_shards_are_in_order_whatever_the_order_of_ranks():
    merged = merge_indices([share(7, 10), share(0, 4), share(4, 7)])
    assert [shard["start"] for shard in merged["w"]["shards"]] == [0, 4, 7]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([share(0, 4), share(5, 10)], "the shards of w do not cover it"),
        ([share(1, 10)], "the shards of w do not cover it"),
        ([share(0, 6), share(5, 10)], "the shards of w do not cover it"),
        ([share(0, 10), share(0, 10)], "the shards of w do not cover it"),
        ([share(0, 9)], "the shards of w end at 9 of 10"),
        ([share(0, 11)], "the shards of w end at 11 of 10"),
        ([share(0, 5), share(5, 10, dtype="F16")], r"ranks disagree about w: F32\[2, 5\] and F16\[2, 5\]"),
        ([share(0, 5), share(5, 10, shape=(5, 2))], r"ranks disagree about w: F32\[2, 5\] and F32\[5, 2\]"),
    ],
)
def test_merge_refuses_gaps_overlaps_and_disagreement(parts, message):
    with pytest.raises(ValueError, match=message):
        merge_indices(parts)


def test_a_tensor_that_no_rank_owns_cannot_be_lost_silently(tmp_path):
    ranks = [{"step": Shard((), 0, torch.tensor(3.0), owner=False)} for _ in range(2)]
    with pytest.raises(ValueError, match="the shards of step end at 0 of 1"):
        write_all(tmp_path, ranks)


def test_mismatches_are_told_in_words(tmp_path):
    stored = {"same": torch.zeros(2), "gone": torch.zeros(3), "shape": torch.zeros(2, 3), "type": torch.zeros(4)}
    write_all(tmp_path, [{name: Shard(tuple(t.shape), 0, t) for name, t in stored.items()}])
    here = {
        "same": torch.zeros(2),
        "new": torch.zeros(1),
        "shape": torch.zeros(3, 2),
        "type": torch.zeros(4, dtype=torch.float16),
    }
    reader = TensorReader.of_component(files_below(tmp_path), "model")
    assert reader.mismatches({name: Shard(tuple(t.shape), 0, t) for name, t in here.items()}) == [
        "gone is only in the checkpoint",
        "new is not in the checkpoint",
        "shape is ('F32', (2, 3)) in the checkpoint, ('F32', (3, 2)) here",
        "type is ('F32', (4,)) in the checkpoint, ('F16', (4,)) here",
    ]


def test_a_file_or_an_index_that_is_too_short_is_an_error_not_garbage(tmp_path):
    write_all(tmp_path, [{"w": Shard((8,), 0, torch.arange(8.0))}])
    file, index = tmp_path / "model" / rank_file(0), tmp_path / "model" / INDEX
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"model/rank_00000.safetensors: ends before byte \d+"):
        TensorReader.of_component(files_below(tmp_path), "model").read_into({"w": Shard((8,), 0, torch.zeros(8))})
    file.write_bytes(whole)
    document = json.loads(index.read_text())
    document["w"]["shards"][0]["stop"] = 7
    index.write_text(json.dumps(document))
    with pytest.raises(DamagedCheckpoint, match=r"has 7 of 8 elements of w\[0:8\]"):
        TensorReader.of_component(files_below(tmp_path), "model").read_into({"w": Shard((8,), 0, torch.zeros(8))})


def test_an_index_that_points_elsewhere_reaches_only_what_the_manifest_has(tmp_path):
    write_all(tmp_path / "in", [{"w": Shard((8,), 0, torch.arange(8.0))}])
    files = files_below(tmp_path / "in")
    (tmp_path / "in/model" / rank_file(0)).rename(tmp_path / "out")
    reader = TensorReader.of_component(files, "model")
    for name in ("../../out", str(tmp_path / "out"), "out"):
        reader.index["w"]["shards"][0]["file"] = name
        with pytest.raises(DamagedCheckpoint, match="not in the manifest"):
            reader.read_into({"w": Shard((8,), 0, torch.zeros(8))})
