"""python -m benchmarks.tools: what `merge` of a checkpoint costs beside copying its bytes: seconds and memory.

A checkpoint of a random Llama (float32, divided over two ranks as FSDP2 does) is merged and copied in turn, each by a
process of its own, from memory to the disk. The copy is `cp` and then `sync` of what it wrote, since a merge is on the
disk when it ends; a merge hashes what it reads, and reads back what it wrote. The seconds are of the whole command,
those of Python's imports are told beside them; where other work is on the machine, the processor's seconds say more.
Memory is the largest resident set of the process.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rlhf
from rlhf.backends.fsdp2 import row_range
from rlhf.checkpoint.commit.manifest import Manifest, describe, write_manifest
from rlhf.checkpoint.driver_state import DriverState
from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.storage.files import WrittenFile, write_file, write_json
from rlhf.storage.layout import CONFIG, DRIVER_STATE, INDEX, rank_file
from rlhf.storage.shard_index import FileShards, merge_shares
from rlhf.storage.shards import Shard, Shards, tensor_table, write_shards

TINY_POLICY = Path(rlhf.__file__).parent / "models" / "tiny_policy"
RANKS, FOLDER = 2, "actor/model"


@dataclass(frozen=True)
class Cost:
    """Seconds of processes, those of the processor, and the most memory that one had, in bytes."""

    seconds: float
    processor: float
    resident: int


def make_checkpoint(root: Path, nbytes: int) -> Path:
    """A checkpoint of about `nbytes` bytes of weights below `root`, and the folder that its run began with."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 32_000}
    layers = max(1, round((nbytes / 4 - 2 * 32_000 * 1024) / (16 << 20)))
    config = LlamaConfig(num_hidden_layers=layers, **shape)  # type: ignore[arg-type]
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    base = shutil.copytree(TINY_POLICY, root / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(base)
    checkpoint = root / "global_step_1"
    written: list[WrittenFile] = []
    shares: list[FileShards] = []
    for rank in range(RANKS):
        shards = _shards(shapes, rank)
        files, share = write_shards(checkpoint, FOLDER, rank_file(rank), shards)
        written, shares = written + files, [*shares, share]
    index = merge_shares(tensor_table(shards), shares)
    written.append(write_file(checkpoint, f"{FOLDER}/{INDEX}", [index]))
    settings = Config()
    settings.model.path = str(base)
    written.append(write_file(checkpoint, CONFIG, [to_yaml(settings).encode()]))
    written.append(write_json(checkpoint, DRIVER_STATE, DriverState("r", 1, 1.0, step=1).state_dict()))
    manifest = Manifest(1, RANKS, "fsdp2", ["model"], ["actor"], "", {}, "2026-01-01", {}, [1] * RANKS)
    write_manifest(checkpoint, Manifest(**vars(manifest) | {"files": describe(written)}))
    return checkpoint


def _shards(shapes: dict[str, tuple[int, ...]], rank: int) -> Shards:
    torch.manual_seed(rank)
    shards = {}
    for name, shape in shapes.items():
        start, stop = row_range(shape, rank, RANKS)
        shards[name] = Shard(shape, start, torch.randn(stop - start))
    return shards


def run(*commands: Sequence[str]) -> Cost:
    """Run commands one after the other; fails when one does."""
    started, processor, most = time.monotonic(), 0.0, 0
    for command in commands:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        most, processor = max(most, usage.ru_maxrss << 10), processor + usage.ru_utime + usage.ru_stime
    return Cost(time.monotonic() - started, processor, most)


def measure(checkpoint: Path, disk: Path, repeats: int, shard_size: str) -> dict[str, list[Cost]]:
    """Costs of each way in turn; the first round is not counted."""
    target = disk / "target"
    merge = ["merge", "--local_dir", str(checkpoint), "--target_dir", str(target), "--max-shard-size", shard_size]
    ways: dict[str, list[list[str]]] = {
        "cp": [["cp", "-r", str(checkpoint), str(target)]],
        "cp and sync": [
            ["cp", "-r", str(checkpoint), str(target)],
            ["find", str(target), "-type", "f", "-exec", "sync", "{}", "+"],
        ],
        "imports": [[sys.executable, "-c", "import torch, rlhf.checkpoint.interop.native.layout_native"]],
        "merge": [[sys.executable, "-m", "rlhf.checkpoint", *merge]],
    }
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, commands in ways.items():
            cost = run(*commands)
            if repeat:
                costs[name].append(cost)
            shutil.rmtree(target, ignore_errors=True)
    return costs


def table(costs: dict[str, list[Cost]]) -> list[str]:
    """A row for each way: medians, and the ratios of paired runs to the copy's."""
    rows = ["| | seconds | to cp and sync | processor's seconds | to cp and sync | most memory |\n", "|---" * 6 + "|\n"]
    base = costs["cp and sync"]
    for name, runs in costs.items():
        cells = []
        for what in ("seconds", "processor"):
            figures, others = ([getattr(cost, what) for cost in each] for each in (runs, base))
            ratios = [a / b for a, b in zip(figures, others, strict=True)]
            cells += [f"{statistics.median(figures):.2f} s", f"{statistics.median(ratios):.2f}"]
        most = max(cost.resident for cost in runs) / 2**20
        rows.append(f"| {name} | {' | '.join(cells)} | {most:.0f} MiB |\n")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=2000, help="of the checkpoint, in MB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--source", default="/dev/shm", help="a folder for the checkpoint")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder on the disk that is written to")
    arguments = parser.parse_args()
    sys.stdout.write(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start\n")
    with (
        tempfile.TemporaryDirectory(prefix="rlhf-benchmark-", dir=arguments.source) as source,
        tempfile.TemporaryDirectory(prefix="rlhf-benchmark-", dir=arguments.disk) as disk,
    ):
        # By a process of its own: the memory of a new one counts as its parent's until it runs another program.
        with ProcessPoolExecutor(1, get_context("spawn")) as maker:
            checkpoint = maker.submit(make_checkpoint, Path(source), int(arguments.size * 1e6)).result()
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        sys.stdout.write(f"a checkpoint of {size / 1e6:.0f} MB\n")
        sys.stdout.flush()
        sys.stdout.writelines(table(measure(checkpoint, Path(disk), arguments.repeats, arguments.max_shard_size)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
