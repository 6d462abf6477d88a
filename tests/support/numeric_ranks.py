"""Runs real ranks on gloo: several processes that run a function, or this process as the only rank."""

import faulthandler
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.preload import forkserver


def run_ranks(world_size: int, function: Callable[[], Any]) -> list[Any]:
    """Return the results of `function` (importable by name) on each rank, or raise a rank's exception."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                _rank, (world_size, function, folder), nprocs=world_size, start_method=forkserver.get_start_method()
            )
        except mp.ProcessExitedException as error:
            for stacks in sorted(Path(folder).glob("stacks-*")):
                error.add_note(f"{stacks.name}:\n{stacks.read_text()}")
            raise
        return [torch.load(Path(folder, str(rank)), weights_only=True) for rank in range(world_size)]


def _rank(rank: int, world_size: int, function: Callable[[], Any], folder: str) -> None:
    with Path(folder, f"stacks-{rank}").open("w") as stacks:
        faulthandler.enable(stacks)  # A rank once died of SIGSEGV in CI, and its exit code alone said nothing.
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        torch.save(function(), Path(folder, str(rank)))
        dist.destroy_process_group()
        faulthandler.disable()


@contextmanager
def single_rank(backend: str = "gloo") -> Iterator[None]:
    """Make this process the only rank.

    With vLLM in the process it stays a rank, because vLLM creates its groups once per process.
    """
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            if "vllm.distributed.parallel_state" not in sys.modules:
                dist.destroy_process_group()
