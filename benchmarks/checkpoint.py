"""python -m benchmarks.checkpoint: measures saves and loads relative to the limits of disk and memory.

Raw files, this package and other libraries save and load the same state in rotating order, on all ranks at once. A time
is the slowest rank's. Figures are medians with the minimum and maximum in brackets. `to raw` is the ratio to raw files,
and a ratio is the median of the ratios within a round. Loads from disk begin with an empty page cache, loads from tmpfs
read memory.

`asynchronous` measures how long background saves (this package's and `dcp.async_save`) stop the training, relative to
a copy of the state into allocated memory. Steps (matrix products of about 20 ms on every rank) run until the
checkpoint is durable; `next steps` is their slowdown.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.checkpoint_ways import AsyncWay, DcpAsync, OursAsync, State, ways
from benchmarks.figures import ratios, rotated, spread

STEP_S, QUIET_STEPS = 0.02, 20
Times = dict[str, list[float]]


def timed(action: Callable[[], object]) -> float:
    """Return the slowest rank's seconds, from the time when every rank is ready."""
    dist.barrier()
    return _slowest(_once(action))


def drop_from_cache(folder: Path) -> None:
    """Drop the fsynced files in `folder` from the page cache. Does nothing on tmpfs."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def save_and_load(
    root: Path, nbytes: int, repeats: int, skipped: list[str]
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds of saves and loads in `root` by way, without the first round."""
    found = ways(State(nbytes), skipped)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in found}
    for repeat in range(repeats + 1):
        for name, way in rotated(found.items(), repeat):
            folder = root / f"{name}-{repeat}".replace(" ", "_")
            if dist.get_rank() == 0:
                folder.mkdir()
            dist.barrier()
            way.prepare(folder)
            save = timed(partial(way.save, folder))
            if dist.get_rank() == 0:
                drop_from_cache(folder)
            load = timed(partial(way.load, folder))
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
            if repeat:
                times[name][0].append(save)
                times[name][1].append(load)
    return times


def steps_until(done: Callable[[], bool], work: Callable[[], None], deadline_s: float = 600.0) -> list[float]:
    """Return the seconds of each step of `work` until `done`."""
    seconds: list[float] = []
    end = time.perf_counter() + deadline_s
    while not seconds or not done():
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
        if time.perf_counter() > end:
            raise TimeoutError("the save does not end")
    return seconds


def make_work() -> Callable[[], None]:
    """Return a simulated training step of this rank that takes about STEP_S on an idle machine."""
    a = torch.randn(384, 384)
    started, count = time.perf_counter(), 50
    for _ in range(count):
        a @ a
    products = max(1, round(STEP_S * count / (time.perf_counter() - started)))

    def work() -> None:
        for _ in range(products):
            a @ a

    return work


def asynchronous(savers: dict[str, AsyncWay], state: State, repeats: int) -> dict[str, Times]:
    """Return the figures of each way: copy, stall and commit in seconds, steps until the commit, and their slowdown.

    The first round is left out.
    """
    live = state.tensors
    copies = [torch.zeros_like(tensor) for tensor in live]
    work = make_work()
    names = ("copy", "stall", "commit", "steps", "slower")
    times: dict[str, Times] = {way: {name: [] for name in names} for way in savers}
    for step in range(1, repeats + 2):
        for way, saver in rotated(savers.items(), step):
            quiet = statistics.mean(_once(work) for _ in range(QUIET_STEPS))
            copy = timed(lambda: [c.copy_(t) for c, t in zip(copies, live, strict=True)])
            dist.barrier()
            began = time.perf_counter()
            saver.start(step)
            stall = time.perf_counter() - began
            busy = steps_until(saver.done, work)
            commit = time.perf_counter() - began
            saver.finish()
            figures = [_slowest(f) for f in (copy, stall, commit, len(busy), statistics.mean(busy) / quiet)]
            if step > 1:
                for name, figure in zip(names, figures, strict=True):
                    times[way][name].append(figure)
    return times


def _once(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _slowest(figure: float) -> float:
    """Return the largest value over all ranks."""
    tensor = torch.tensor(figure, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def measure(rank: int, world_size: int, join: str, folders: dict[str, Path], arguments: argparse.Namespace) -> None:
    """Run one rank, in an empty folder per storage. Rank 0 prints the results."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{join}/store", rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
    )
    print_on_driver(f"\n## {world_size} rank{'s' if world_size > 1 else ''}, {arguments.repeats} runs each\n\n")
    print_on_driver("| storage | state | way | save | to raw | load | to raw |\n|---|---|---|---|---|---|---|\n")
    rows = []
    for storage, folder in folders.items():
        for size in arguments.sizes:
            root, nbytes, where = folder / f"{size:g}", int(size * 1e6), f"{storage} | {size:g} MB"
            if rank == 0:
                root.mkdir()
            dist.barrier()
            print_on_driver(*table_of_ways(where, save_and_load(root, nbytes, arguments.repeats, arguments.skip)))
            state = State(nbytes)
            savers: dict[str, AsyncWay] = {
                "rlhf": OursAsync(state, root),
                "rlhf, and hf_model": OursAsync(state, root / "exported", ["hf_model"]),
                "dcp.async_save": DcpAsync(state, root),
            }
            for way, times in asynchronous(savers, state, arguments.repeats).items():
                rows.append(row_of_async(f"{where} | {way}", times))
            if rank == 0:
                shutil.rmtree(root)
    print_on_driver(
        "\n| storage | state | way | copy | stall | to copy | until durable | next steps |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    print_on_driver(*rows)
    dist.destroy_process_group()


def print_on_driver(*lines: str) -> None:
    """Print on rank 0, and flush."""
    if dist.get_rank() == 0:
        sys.stdout.write("".join(lines))
        sys.stdout.flush()


def table_of_ways(where: str, times: dict[str, tuple[list[float], list[float]]]) -> list[str]:
    limit = next(iter(times.values()))
    rows = []
    for name, (saves, loads) in times.items():
        cells = [
            cell
            for seconds, base in zip((saves, loads), limit, strict=True)
            for cell in (f"{spread(seconds)} s", spread(ratios(seconds, base), ".2f"))
        ]
        rows.append(f"| {where} | {name} | {' | '.join(cells)} |\n")
    return rows


def row_of_async(where: str, times: Times) -> str:
    cells = [
        f"{spread(times['copy'])} s",
        f"{spread(times['stall'])} s",
        spread(ratios(times["stall"], times["copy"]), ".2f"),
        f"{spread(times['commit'])} s, {statistics.median(times['steps']):.0f} steps",
        spread(times["slower"], ".2f"),
    ]
    return f"| {where} | {' | '.join(cells)} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[10, 100], help="sizes of the whole state, in MB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder on the disk to measure")
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder in memory")
    parser.add_argument(
        "--skip",
        nargs="+",
        default=[],
        help="leave out ways whose names begin with these: deepspeed and verl need several times the state in memory",
    )
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    sys.stdout.write(f"{os.cpu_count()} cores, load {load:.1f} at the start\n")
    sys.stdout.flush()
    for world_size in arguments.ranks:
        with (
            tempfile.TemporaryDirectory() as join,
            tempfile.TemporaryDirectory(prefix="rlhf-benchmark-", dir=arguments.disk) as disk,
            tempfile.TemporaryDirectory(prefix="rlhf-benchmark-", dir=arguments.tmpfs) as tmpfs,
        ):
            folders = {"disk": Path(disk), "tmpfs": Path(tmpfs)}
            mp.spawn(measure, (world_size, join, folders, arguments), nprocs=world_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
