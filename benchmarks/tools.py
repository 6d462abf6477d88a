"""python -m benchmarks.tools: compares time and memory of `merge` with a copy of the checkpoint's bytes.

Separate processes merge and copy a checkpoint of a random Llama (float32, sharded over two ranks like FSDP2), from
memory to disk. One merge keeps the stored dtype; another converts to bfloat16, for which it imports torch. The copy is
`cp` plus `sync`, since a merge ends with its files on disk. A merge also hashes its input and reads back its output.
Seconds are of the whole command; the row `imports` shows the imports alone. On a busy machine processor
seconds are more reliable. Memory is the peak RSS.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.figures import ratios, rotated, spread

IMPORTS = "import rlhf.convert.verbs.convert, rlhf.convert.verbs.outputs, rlhf.checkpoint.export.hf_work"


@dataclass(frozen=True)
class Cost:
    """Wall seconds and processor seconds of processes, and the largest memory of one process in bytes."""

    seconds: float
    processor: float
    resident: int


def make(root: Path, nbytes: int) -> Path:
    """Make the checkpoint. Call this in a separate process, because it imports torch.

    A command inherits the memory of the process that starts it, and torch's memory would count in the command's peak.
    """
    from benchmarks.random_checkpoint import make_checkpoint

    return make_checkpoint(root, nbytes)


def run(*commands: Sequence[str]) -> Cost:
    """Run commands one after the other, and return their cost. Raise CalledProcessError if one fails."""
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
    """Return the costs of each way, interleaved, without the first round."""
    target = disk / "target"
    merge = ["merge", "--local_dir", str(checkpoint), "--target_dir", str(target), "--max-shard-size", shard_size]
    ways: dict[str, list[list[str]]] = {
        "cp": [["cp", "-r", str(checkpoint), str(target)]],
        "cp and sync": [
            ["cp", "-r", str(checkpoint), str(target)],
            ["find", str(target), "-type", "f", "-exec", "sync", "{}", "+"],
        ],
        "imports": [[sys.executable, "-c", IMPORTS]],
        "merge": [[sys.executable, "-m", "rlhf.checkpoint", *merge]],
        "merge --dtype bfloat16": [[sys.executable, "-m", "rlhf.checkpoint", *merge, "--dtype", "bfloat16"]],
    }
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, commands in rotated(ways.items(), repeat):
            cost = run(*commands)
            if repeat:
                costs[name].append(cost)
            shutil.rmtree(target, ignore_errors=True)
    return costs


def table(costs: dict[str, list[Cost]]) -> list[str]:
    """Return a row for each way: medians, spread, ratios to `cp` plus `sync` within a round, peak memory."""
    rows = ["| | seconds | to cp and sync | processor seconds | to cp and sync | peak memory |\n", "|---" * 6 + "|\n"]
    base = costs["cp and sync"]
    for name, runs in costs.items():
        cells = []
        for what in ("seconds", "processor"):
            figures, others = ([getattr(cost, what) for cost in each] for each in (runs, base))
            cells += [f"{spread(figures, '.2f')} s", spread(ratios(figures, others), ".2f")]
        most = max(cost.resident for cost in runs) / 2**20
        rows.append(f"| {name} | {' | '.join(cells)} | {most:.0f} MiB |\n")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=2000, help="size of the checkpoint, in MB")
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
        with ProcessPoolExecutor(1, get_context("spawn")) as maker:
            checkpoint = maker.submit(make, Path(source), int(arguments.size * 1e6)).result()
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        sys.stdout.write(f"a checkpoint of {size / 1e6:.0f} MB\n")
        sys.stdout.flush()
        sys.stdout.writelines(table(measure(checkpoint, Path(disk), arguments.repeats, arguments.max_shard_size)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
