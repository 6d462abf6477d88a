"""python -m benchmarks.scale: simulates each rank's messages and work for a save and a load on many ranks.

The trainer's own functions build, merge, read and search the messages, the manifest and the indices of a model under
FSDP2, in one process and without weights, for each number of ranks. Figures are per rank: one rank's own work, and the
leader's work divided by the number of ranks. Seconds are processor seconds. Every rank of a load receives the manifest;
the figures of the manifest and of verified blocks are per file and block of the checkpoint.

Exits with 0 if no figure grows with the ranks: from the fewest to the most ranks each figure at most doubles (seconds:
triples), or stays below 64 KiB, 20 ms or 4 blocks of an index (per file and block: 128 bytes or 0.1 ms).
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.scale_step import LIMIT, step_table
from rlhf.backends.fsdp2 import chunk_of
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.manifest import Manifest, parse_manifest, write_manifest
from rlhf.checkpoint.load.locations import FileLocations
from rlhf.checkpoint.load.verification import BlockNumbers
from rlhf.checkpoint.save.pending import PendingCheckpoint
from rlhf.checkpoint.save.snapshot import Snapshot
from rlhf.checkpoint.save.writer import Commit, RankFiles, complete
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.object_codec import decode, encode
from rlhf.ranks.transport import Transport
from rlhf.storage.boxes import Box
from rlhf.storage.files import WrittenFile
from rlhf.storage.hashing import BLOCK
from rlhf.storage.layout import INDEX, MANIFEST, rank_file
from rlhf.storage.reading import HASH_DIGITS, CheckedFiles
from rlhf.storage.shard_index import ShardIndex
from rlhf.storage.shards import Shard, Shards, lay_out

MODELS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4},
    "7b": {},
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
"""Each size's LlamaConfig, without defaults."""
COMPONENTS = {"actor/model": ("",), "actor/optimizer": (".exp_avg", ".exp_avg_sq", ".step")}
SMALL = {"bytes": 64 << 10, "seconds": 0.02, "blocks": 4}
SMALL_PER_ENTRY = {"bytes": 128, "seconds": 1e-4}
GROWTH = {"bytes": 2.0, "seconds": 3.0, "blocks": 2.0}
Figures = dict[str, float]
"""Figures by name; names end with the unit."""
PER_ENTRY = "per file and block"
T = TypeVar("T")


def model_shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**MODELS[size]))  # type: ignore[arg-type]
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shards_of(shapes: dict[str, tuple[int, ...]], rank: int, world_size: int) -> dict[str, Shards]:
    """Return a rank's components as FSDP2 shards them, without memory."""
    found: dict[str, dict[str, Shard]] = {folder: {} for folder in COMPONENTS}
    scalar = Shard((), (0,), torch.empty((), device="meta"), saved_here=rank == 0)
    for name, shape in shapes.items():
        box = chunk_of(Box((0,) * len(shape), shape), 0, rank, world_size)
        shard = Shard(shape, box.offsets, torch.empty(box.sizes, device="meta"))
        for folder, suffixes in COMPONENTS.items():
            for suffix in suffixes:
                found[folder][f"{name}{suffix}"] = scalar if suffix == ".step" else shard
    return {folder: shards for folder, shards in found.items()}  # noqa: C416 - another type of value


def written_by(components: dict[str, Shards], rank: int) -> RankFiles:
    """Return a rank's message to the leader after it has written its files."""
    rank_files = RankFiles()
    for folder, shards in components.items():
        flat, share = lay_out(rank_file(rank), shards)
        rank_files.indices[folder] = share
        if flat:
            size = share.first_byte + sum(tensor.nbytes for tensor in flat.values())
            digests = "0" * HASH_DIGITS * -(-size // BLOCK)
            rank_files.files.append(WrittenFile(f"{folder}/{rank_file(rank)}", size, digests))
        rank_files.add_seconds("actor", 0.1)
    return rank_files


def timed(action: Callable[[], T], times: int = 1) -> tuple[T, float]:
    """Return the result of `action` and its processor seconds, the minimum of `times` calls.

    Garbage collection over the objects of all simulated ranks can double the time, so it is off. A busy machine can
    double it, too.
    """
    seconds = []
    gc.disable()
    try:
        for _ in range(times):
            started = time.process_time()
            result = action()
            seconds.append(time.process_time() - started)
    finally:
        gc.enable()
    return result, min(seconds)


def save_figures(shapes: dict[str, tuple[int, ...]], world_size: int, folder: Path) -> tuple[Manifest, Figures]:
    """Simulate the messages of a save, and the leader's work; write manifest and indices to `folder`."""
    middle = world_size // 2
    _, own_seconds = timed(lambda: encode(written_by(shards_of(shapes, middle, world_size), middle)))
    messages = [encode(written_by(shards_of(shapes, rank, world_size), rank)) for rank in range(world_size)]
    snapshot = Snapshot(1, ["model", "optimizer"], ["actor"], components=shards_of(shapes, 0, world_size))
    coordinator = Coordinator(Transport())
    coordinator.domains = [0] * world_size
    identity = Identity("fsdp2", "", {}, {}, [1])

    def lead() -> Commit:
        ranks = [decode(message) for message in messages]
        return complete(folder, snapshot, identity, PendingCheckpoint(folder, {}), ranks, coordinator)

    commit, seconds = timed(lead)
    for path, content in commit.indices.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    _, sealing_seconds = timed(lambda: write_manifest(folder, commit.manifest))
    return commit.manifest, {
        "save, a rank sends: bytes": len(messages[middle]),
        "save, a rank receives: bytes": len(encode(commit.throughput)),
        "save, a rank: seconds": own_seconds,
        "save, the leader receives: bytes": sum(map(len, messages)) / world_size,
        "save, the leader: seconds": seconds / world_size,
        "save, the leader writes: bytes": (sum(map(len, commit.indices.values())) + (folder / MANIFEST).stat().st_size)
        / world_size,
        "save, the leader writes the manifest: seconds": sealing_seconds / world_size,
    }


def load_figures(
    shapes: dict[str, tuple[int, ...]], world_size: int, folder: Path, manifest: Manifest
) -> Iterator[tuple[str, float]]:
    """Yield the figures of a rank's search for its shards in the checkpoint in `folder`."""
    raw = (folder / MANIFEST).read_bytes()
    _, seconds = timed(lambda: parse_manifest(raw, folder / MANIFEST))
    yield "load, the leader parses: seconds", seconds / world_size
    message = encode(manifest)
    _, seconds = timed(lambda: decode(message))
    yield f"load, a rank receives the manifest, {PER_ENTRY}: bytes", len(message) / _entries(manifest)
    yield f"load, a rank receives the manifest, {PER_ENTRY}: seconds", seconds / _entries(manifest)
    for what, of_ranks in (("the same ranks", world_size), ("half the ranks", max(1, world_size // 2))):
        rank = of_ranks // 2
        components = shards_of(shapes, rank, of_ranks)

        def find(rank: int = rank, of_ranks: int = of_ranks, own: dict[str, Shards] = components) -> CheckedFiles:
            files = CheckedFiles(folder, manifest.files)
            for name, shards in own.items():
                wanted = {n: shard.box for n, shard in shards.items() if shard.local.numel()}
                ShardIndex(files, name).find(wanted, rank, of_ranks)
            return files

        files, seconds = timed(find, 5)
        yield f"load by {what}, a rank: seconds", seconds
        for name in components:
            yield f"load by {what}, {name}: blocks", len(files.checked[f"{name}/{INDEX}"])
    numbers, seconds = timed(
        lambda: BlockNumbers(FileLocations.whole(folder, manifest), CheckedFiles(folder, manifest.files))
    )
    bits, more = timed(lambda: numbers.bits({}))
    yield f"load, a rank reports verified blocks, {PER_ENTRY}: bytes", len(bits) / _entries(manifest)
    yield f"load, a rank reports verified blocks, {PER_ENTRY}: seconds", (seconds + more) / _entries(manifest)


def saves_of(shapes: dict[str, tuple[int, ...]], worlds: Sequence[int]) -> dict[int, tuple[int, float]]:
    """Return, by number of ranks, the bytes that the leader of a save receives, and its processor seconds."""
    found = {}
    for world_size in worlds:
        with tempfile.TemporaryDirectory() as name:
            per_rank = save_figures(shapes, world_size, Path(name))[1]
        leading = (per_rank["save, the leader: seconds"], per_rank["save, the leader writes the manifest: seconds"])
        found[world_size] = round(per_rank["save, the leader receives: bytes"] * world_size), sum(leading) * world_size
    return found


def _entries(manifest: Manifest) -> int:
    return sum(1 + len(entry["xxh3_128"]) // HASH_DIGITS for entry in manifest.files.values())


def figures(shapes: dict[str, tuple[int, ...]], world_size: int) -> Figures:
    """Return all figures for `world_size` ranks."""
    with tempfile.TemporaryDirectory() as name:
        manifest, saved = save_figures(shapes, world_size, Path(name))
        return saved | dict(load_figures(shapes, world_size, Path(name), manifest))


def growing(table: dict[int, Figures]) -> list[str]:
    """Return the figures that grow with the number of ranks."""
    fewest, most = table[min(table)], table[max(table)]
    grown = []
    for name, value in fewest.items():
        unit = name.rpartition(" ")[2]
        small = SMALL_PER_ENTRY if PER_ENTRY in name else SMALL
        if most[name] > max(small[unit], value * GROWTH[unit]):
            grown.append(name)
    return grown


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures. Return 1 if a figure grows, or with --step if the step's share exceeds the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="default 64 512 4096; with --step 64 512 1024")
    parser.add_argument("--step", action="store_true", help="show the cost of a training step (benchmarks/scale_step)")
    parser.add_argument("--model", choices=MODELS, default="7b")
    arguments = parser.parse_args(argv)
    shapes = model_shapes(arguments.model)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    if arguments.step:
        table_of_step, share = step_table(arguments.model, saves_of(shapes, sorted(arguments.ranks or [64, 512, 1024])))
        console.print(table_of_step)
        return 1 if share > LIMIT else 0
    table = {world_size: figures(shapes, world_size) for world_size in sorted(arguments.ranks or [64, 512, 4096])}
    shown = Table(f"{arguments.model}, per rank", *(f"{world_size} ranks" for world_size in table))
    for name in table[min(table)]:
        shown.add_row(name, *(f"{of_ranks[name]:.3g}" for of_ranks in table.values()))
    console.print(shown)
    if grown := growing(table):
        console.print(f"These grow with the ranks: {'; '.join(grown)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
