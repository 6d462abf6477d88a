"""python -m benchmarks.snapshots: measures how much a snapshot in memory after each step lengthens the steps.

One rank with one thread computes a simulated step (matrix products) with and without a snapshot of the same state, in
turn. In a step with a snapshot, the state is copied before the work, the snapshot is published during the work, and the
step then waits for the publication. `ratio` is the time with a snapshot divided by the time without, as the median over
the pairs of steps.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint_ways import State, make_checkpointer
from benchmarks.figures import ratios, spread
from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport

CALIBRATION = 200


def make_step(seconds: float) -> Callable[[], None]:
    """Return a simulated step that takes about `seconds` on an idle core."""
    a = torch.randn(384, 384)
    started = time.perf_counter()
    for _ in range(CALIBRATION):
        a @ a
    products = max(1, round(seconds * CALIBRATION / (time.perf_counter() - started)))

    def step() -> None:
        for _ in range(products):
            a @ a

    return step


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(checkpointer: Checkpointer, step: Callable[[], None], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of steps without and with a snapshot, and of the training's wait for a snapshot.

    The first pair of steps, in which memory is allocated, is left out.
    """
    times: dict[str, list[float]] = {"without": [], "with": [], "stall": []}

    def step_with_snapshot(number: int) -> None:
        checkpointer.maybe_save(number, {})
        step()
        checkpointer.finish()

    for number in range(1, repeats + 2):
        without, with_snapshot = timed(step), timed(lambda: step_with_snapshot(number))  # noqa: B023
        if number > 1:
            times["without"].append(without)
            times["with"].append(with_snapshot)
            times["stall"].append(checkpointer.metrics()["timing_s/memory_snapshot"])
    return times


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.snapshots", description=__doc__)
    parser.add_argument("--size", type=float, default=500, help="size of the state, in MB")
    parser.add_argument("--step", type=float, default=5.0, help="seconds of a step")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start\n")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        state, coordinator = State(int(arguments.size * 1e6)), Coordinator(GlooTransport())
        checkpointer = make_checkpointer(Path(folder), state, coordinator, async_save=True, memory=memory)
        times = measure(checkpointer, make_step(arguments.step), arguments.repeats)
        dist.destroy_process_group()
    for name, seconds in times.items():
        sys.stdout.write(f"{name:8} {spread(seconds, '.3f')} s\n")
    sys.stdout.write(f"ratio    {spread(ratios(times['with'], times['without']), '.3f')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
