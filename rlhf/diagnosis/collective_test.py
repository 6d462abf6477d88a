"""Tests collectives of real process groups: the sum of an all-reduce, its speed, and the speed of pairs of ranks."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.diagnosis.check_result import Outcome, counted, error, ok, one_line, warning
from rlhf.diagnosis.store_transport import prefix
from rlhf.ranks.collectives import connect_to_store, pick_device
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.machines import settle_places

BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
"""Bytes of each tensor, by device."""
REPEATS = 3
MOST_ROUNDS = 31
"""Maximum number of rounds: enough for all pairs of 32 ranks or nodes. A rank has at most one partner per round."""
SLOW = 1 / 3
"""A pair with less than this fraction of the median bandwidth is slow."""
DEADLINE_S = 45.0
REMEDY = (
    "Check cables, switch and firewall, and the interfaces that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name; "
    "NCCL_DEBUG=INFO shows NCCL's choice."
)


@dataclass
class RankProgress:
    """One rank's part of the test. Another thread reads it while the test runs."""

    stage: str = "starting"
    """Description of the rank's current part of the test."""
    done: bool = False
    problem: str | None = None
    device: str = ""
    total: float = 0.0
    """First entry of the all-reduced tensor."""
    all_reduce: float = 0.0
    """Bytes per second."""
    pairs: dict[str, float] = field(default_factory=dict)
    """`A-B` -> bytes per second between the ranks A and B. Rank A has the entry."""


def run_collective_test(trainer: TrainerConfig, coordinator: Coordinator, members: Sequence[int]) -> list[Outcome]:
    """Test the ranks of `coordinator`, and return the outcomes on rank 0, nothing on the other ranks. Collective.

    Args:
        members: the ranks that form pairs: one of each node, or all ranks of a single node.

    A rank that hangs does not delay the others: after DEADLINE_S seconds its stage is reported.
    """
    progress = RankProgress()
    # A daemon thread: a collective that hangs must not keep this process from ending.
    thread = Thread(target=_test, args=(trainer, coordinator, members, progress), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    ranks = coordinator.collect(lambda: progress)
    return [] if ranks is None else list(outcomes(ranks))


def _test(trainer: TrainerConfig, coordinator: Coordinator, members: Sequence[int], progress: RankProgress) -> None:
    rank, world_size = coordinator.rank, coordinator.world_size
    try:
        # Use a separate connection: a call that hangs would block other threads' calls on the same connection.
        store = dist.PrefixStore(f"{prefix()}/group", connect_to_store(timedelta(seconds=DEADLINE_S)))
        device = pick_device(trainer.device)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        gpu = str(torch.cuda.get_device_properties(device).uuid) if cuda else ""
        settle_places(store, rank, world_size, gpu, remote_servers=False)
        progress.stage, progress.device = "connecting", device.type
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            # Longer than the deadline of this test, whose report names the rank and its stage.
            timeout=timedelta(seconds=2 * DEADLINE_S),
            device_id=device if cuda else None,
        )
        _all_reduce(device, progress)
        for partner in partners(members, rank):
            _exchange(device, rank, partner, progress)
        progress.done = True
    except Exception as problem:  # rank 0 reports it
        progress.problem = f"{type(problem).__name__}: {one_line(problem)}"


def _all_reduce(device: torch.device, progress: RankProgress) -> None:
    progress.stage = "all-reduce"
    tensor = torch.full((BYTES[device.type] // 4,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(tensor)
    progress.total = float(tensor[0])
    tensor.zero_()
    _wait_for(device)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(tensor)
    _wait_for(device)
    progress.all_reduce = REPEATS * tensor.nbytes / (time.perf_counter() - begin)


def _exchange(device: torch.device, rank: int, partner: int, progress: RankProgress) -> None:
    """Send a tensor to the partner and back, and measure the speed."""
    first, second = sorted((rank, partner))
    progress.stage = f"exchange of ranks {first} and {second}"
    tensor, small = torch.zeros(BYTES[device.type], dtype=torch.uint8, device=device), torch.zeros(1, device=device)
    for each in (small, tensor):  # the small tensor connects the two ranks and synchronises them
        begin = time.perf_counter()
        for source in (first, second):
            if source == rank:
                dist.send(each, partner)
            else:
                dist.recv(each, partner)
        _wait_for(device)
    if rank == first:
        progress.pairs[f"{first}-{second}"] = 2 * tensor.nbytes / (time.perf_counter() - begin)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def partners(members: Sequence[int], rank: int) -> Iterator[int]:
    """Yield the partner of `rank` in each round in which `rank` has one. No pair of members occurs twice."""
    if rank not in members:
        return
    places: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    last = len(places) - 1
    for round_number in range(min(last, MOST_ROUNDS)):
        # The first place stays, the others move around a circle; opposite places are partners.
        circle = [places[0], *(places[1 + (i + round_number) % last] for i in range(last))]
        partner = circle[last - circle.index(rank)]
        if partner is not None:
            yield partner


def outcomes(ranks: Sequence[RankProgress]) -> Iterator[Outcome]:
    """Yield the outcomes of the test, from the progress of each rank."""
    failed = {rank: each.problem for rank, each in enumerate(ranks) if each.problem is not None}
    waiting = {rank: each.stage for rank, each in enumerate(ranks) if not each.done and each.problem is None}
    if failed or waiting:
        parts = [f"rank {rank} failed in {ranks[rank].stage}: {problem}" for rank, problem in failed.items()]
        parts += [f"rank {rank} hangs in {stage}" for rank, stage in waiting.items()]
        yield error(f"the test failed, or did not end in {DEADLINE_S:g} s: {'; '.join(parts)}. {REMEDY}")
        return
    expected = len(ranks) * (len(ranks) + 1) / 2
    if wrong := [str(rank) for rank, each in enumerate(ranks) if each.total != expected]:
        yield error(f"an all-reduce has a wrong sum on rank {', '.join(wrong)}. Replace this GPU or its node. {REMEDY}")
        return
    pairs = {name: speed for each in ranks for name, speed in each.pairs.items()}
    slow = slow_pairs(pairs)
    yield from slow
    if not slow:
        where = "NCCL on GPUs" if ranks[0].device == "cuda" else "gloo on CPUs"
        text = f"{counted(len(ranks), 'rank')}, {where}: all-reduce {_gbs(min(each.all_reduce for each in ranks))}"
        if pairs:
            slowest, fastest = _gbs(min(pairs.values())), _gbs(max(pairs.values()))
            text += f", each pair {slowest}" + (f" to {fastest}" if fastest != slowest else "")
        yield ok(text)


def slow_pairs(pairs: dict[str, float]) -> list[Outcome]:
    """Return a warning with the pairs whose bandwidth is below SLOW times the median."""
    if not pairs:
        return []
    median = statistics.median(pairs.values())
    slow = {name: speed for name, speed in pairs.items() if speed < SLOW * median}
    if not slow:
        return []
    shown = ", ".join(f"{name} {_gbs(speed)}" for name, speed in sorted(slow.items(), key=lambda item: item[1])[:8])
    return [warning(f"slow pairs of ranks: {shown}; the median is {_gbs(median)}. {REMEDY}")]


def _gbs(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s"
