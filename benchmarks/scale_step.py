"""python -m benchmarks.scale --step: what the messages between ranks add to a training step, as rank 0 sees it.

Real: rank 0 runs `rlhf.loop.train` with the bundled policy, the embedded engine and the settings of `recipes=minimal`,
one prompt with eight samples per rank. It encodes its messages, decodes one for each rank, plans the resharding over
all samples, and writes its status file. The watchdog reads the status files of rank 0's node.

Simulated: the other ranks. Each sends what rank 0 sends, and torch's fake process group replaces NCCL. Collective calls
over tensors (gradients, sums of metrics) are left out.

Measured: seconds of messages between two local ranks over gloo (minimum of many), and of a call of the store. A call
costs its longest chain of messages: an all-gather has log2(ranks) rounds, a broadcast is a binomial tree, a gather has
one message per rank at its root, an all-reduce is a ring. All bytes that rank 0 receives pass one after another.

Assumed: machines exchange messages as fast as ranks on one; a node has eight ranks; a save of the model of --model
after every 20 steps (the default of `trainer.save_freq`), in the background of one step.

Processor seconds are those beyond a step of one rank. Exits with 1 if the sum exceeds 1 % of a 60 s step.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.step import write_prompts
from rlhf import events
from rlhf.assemble.run import build
from rlhf.checkpoint.start.preparation import prepare
from rlhf.compose import compose_config
from rlhf.config.compare import ResolvedConfig
from rlhf.config.library import Library
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.launch.hangs import LOOK_EVERY_S, HangDetector
from rlhf.launch.local.processes import RankProcesses
from rlhf.launch.node_watchdog import REPORT_EVERY_S
from rlhf.loop import train
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.object_codec import decode, encode
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.ranks.status import STATUS_DIR, StatusWriter
from rlhf.ranks.transport import Transport

STEP_S, LIMIT, RANKS_PER_NODE, SAVE_EVERY, BURST = 60.0, 1.0, 8, TrainerConfig().save_freq, 64
STEPS = 5
"""Steps of a simulated run; the first one is not measured."""
SETTINGS = [
    *("recipes=minimal", "model=tiny", "data.max_prompt_length=64", "data.max_response_length=16"),
    *(f"trainer.total_training_steps={STEPS}", "trainer.test_freq=0", "trainer.val_before_train=false"),
    *("trainer.device=cpu", "tracking.progress=plain", "checkpoint.async_save=false"),
]
Call = tuple[str, int, int]
"""Kind, bytes that rank 0 sends in each of its messages, and number of ranks that receive or send."""


class SimulatedRanks(Transport):
    """Transport of rank 0 among ranks that send what rank 0 sends. `calls` has all calls."""

    def __init__(self, ranks: int) -> None:
        self.world_size = ranks
        self.calls: list[Call] = []

    def all_gather(self, value: Any) -> list[Any]:
        return self.gather(value, -1)

    def gather(self, value: Any, to: int) -> list[Any]:
        message = encode(value)
        self.calls.append(("gather" if to == 0 else "all_gather", len(message), self.world_size))
        return [decode(message) for _ in range(self.world_size)]

    def bitwise_or(self, bits: bytes) -> bytes:
        self.calls.append(("bitwise_or", len(bits), self.world_size))
        return bits

    def broadcast(self, value: Any, source: int) -> Any:
        self.calls.append(("broadcast", len(encode(value)), self.world_size))
        return value

    def send_object(self, value: Any, source: int, to: Sequence[int]) -> Any:
        self.calls.append(("send_object", len(encode(value)), 1 + len(to)))
        return value


@dataclass(frozen=True)
class Wire:
    """Seconds between two ranks: of an exchange, a broadcast, one of many messages at once, and a further byte."""

    exchange: float
    broadcast: float
    message: float
    byte: float

    def seconds(self, call: Call) -> float:
        """Return the seconds of a call's longest chain of messages (module docstring)."""
        kind, size, ranks = call
        rounds, others = (ranks - 1).bit_length(), ranks - 1  # log2(ranks), rounded up
        if kind == "broadcast":  # the size, then the content
            return rounds * (2 * self.broadcast + size * self.byte)
        of_bytes = others * size * self.byte
        if kind == "all_gather":  # the sizes, then the contents
            return 2 * rounds * self.exchange + of_bytes
        if kind == "gather":  # an all-gather of the sizes, then the contents
            return 2 * rounds * self.exchange + others * self.message + of_bytes
        return 2 * others * self.exchange + of_bytes


def traffic(calls: Sequence[Call]) -> tuple[int, int]:
    """Return the bytes of objects that rank 0 sends and receives in `calls`; in an all-gather it passes others' on."""
    own, others = (
        sum(size * (ranks - 1) for of, size, ranks in calls if of == kind) for kind in ("all_gather", "gather")
    )
    return own + sum(size * (ranks - 1).bit_length() for of, size, ranks in calls if of == "broadcast"), own + others


def in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(rank, folder, *arguments)` in `count` new processes, and return rank 0's result (JSON)."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_write_result, (folder, function, arguments), nprocs=count)
        return json.loads(Path(folder, "result").read_text())


def _write_result(rank: int, folder: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    result = function(rank, Path(folder), *arguments)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))


def run_steps(rank: int, folder: Path, ranks: int, save_freq: int) -> tuple[list[Call], float]:
    """Run STEPS steps as rank 0 of `ranks`. Return the last but one's calls, and the fewest processor seconds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    write_prompts(folder / "prompts.jsonl")
    sizes = [
        f"{name}={ranks}" for name in ("data.train_batch_size", "actor.ppo_mini_batch_size", "backend.dp_replicate")
    ]
    files = [f"data.train_files={folder / 'prompts.jsonl'}", f"trainer.default_local_dir={folder}"]
    config = compose_config([*SETTINGS, *sizes, *files, f"trainer.save_freq={save_freq}"], Library.find(None))
    transport, marks = SimulatedRanks(ranks), list[tuple[str, float, int]]()
    coordinator = Coordinator(transport)
    events.subscribe(lambda event: marks.append((event, time.process_time(), len(transport.calls))))
    prepare(config.run_dir, config.trainer, config.checkpoint, ResolvedConfig.of(config), coordinator)
    train(build(config, torch.device("cpu"), coordinator, StatusWriter(config.run_dir, rank), ProgressDisplay()))
    steps = list(pairwise([mark for mark in marks if mark[0] == "step.begin"][1:]))
    return transport.calls[steps[-1][0][2] : steps[-1][1][2]], min(end[1] - begin[1] for begin, end in steps)


def time_messages(rank: int, folder: Path, times: int) -> tuple[float, ...]:
    """Return the fields of `Wire`, measured between two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    transport, large = GlooTransport(), bytes(1 << 20)
    all_gather = _fewest(lambda: transport.all_gather(0), times)
    broadcast = _fewest(lambda: transport.broadcast(0, 0), times)
    blocks = [torch.zeros(8) for _ in range(BURST)]

    def burst() -> None:
        for work in [(dist.isend if rank else dist.irecv)(block, 1 - rank) for block in blocks]:
            assert work is not None
            work.wait()

    message = _fewest(burst, times // 5) / BURST
    byte = (_fewest(lambda: transport.all_gather(large), times // 5) - all_gather) / len(large)
    dist.destroy_process_group()
    return all_gather / 2, broadcast / 2, message, byte


def _fewest(action: Callable[[], Any], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    seconds = []
    for _ in range(times):
        started = clock()
        action()
        seconds.append(clock() - started)
    return min(seconds)


def watching_seconds(ranks: int) -> float:
    """Return the seconds per step of the watchdog of rank 0's node, and of all nodes' reports to the store."""
    config = TrainerConfig()
    local, nodes = min(ranks, RANKS_PER_NODE), -(-ranks // RANKS_PER_NODE)
    with tempfile.TemporaryDirectory() as name:
        StatusWriter(Path(name), 0).event(1, "update.mid")
        folder = Path(name) / STATUS_DIR
        for rank in range(1, ranks):
            (folder / f"rank_{rank}.json").write_bytes((folder / "rank_0.json").read_bytes())
        detector, processes = HangDetector(config, 600.0), RankProcesses(dict.fromkeys(range(local), 0), Path(name))
        detector.start(range(local))

        def look() -> None:
            detector._next_look = 0.0
            assert detector.look(processes, range(local)) is None

        seconds = STEP_S / LOOK_EVERY_S * _fewest(look, 50, time.process_time)
    if nodes > 1:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        # A watchdog also reports for a save while it runs. The time of the round trip covers both of its ends.
        reports = (1 + 1 / SAVE_EVERY) * nodes * STEP_S / REPORT_EVERY_S
        seconds += reports * _fewest(lambda: store.add("reports", 1), 5000)
    return seconds


def step_table(model: str, of_saves: dict[int, tuple[int, float]], times: int = 1000) -> tuple[Table, float]:
    """Return a table, and the largest share of a step in %.

    `of_saves` has, by number of ranks, the bytes that the leader receives in a save of `model`, and its seconds.
    """
    wire = Wire(*in_processes(2, time_messages, times))
    own_calls, own_seconds = in_processes(1, run_steps, 1, 0)
    save_calls = in_processes(1, run_steps, 1, 1)[0][len(own_calls) :]
    table = Table(f"step of {STEP_S:g} s, rank 0", *(f"{ranks} ranks" for ranks in of_saves))
    columns, share = [], "share of the step: %"
    for ranks, (received, leading) in of_saves.items():
        calls, seconds = in_processes(1, run_steps, ranks, 0)
        save = leading + received * wire.byte
        save += sum(wire.seconds((kind, size, ranks)) for kind, size, _ in save_calls)
        parts = {
            "messages: seconds": sum(map(wire.seconds, calls)),
            "processor: seconds": max(0.0, seconds - own_seconds),
            "watchdog and its store: seconds": watching_seconds(ranks),
            f"save of {model} / {SAVE_EVERY}: seconds": save / SAVE_EVERY,
        }
        facts = ["calls of a save", "calls", "sent: bytes", "received: bytes"]
        numbers = dict(zip(facts, [len(save_calls), len(calls), *traffic(calls)], strict=True))
        columns.append(numbers | parts | {share: 100 * sum(parts.values()) / STEP_S})
    for name, first in columns[0].items():
        shown = "{:,}" if isinstance(first, int) else "{:.3g}"
        table.add_row(name, *(shown.format(column[name]) for column in columns))
    return table, max(column[share] for column in columns)
