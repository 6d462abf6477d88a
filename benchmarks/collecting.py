"""Measures the collection of a batch on two ranks without an engine: seconds, and memory per response token.

The leader stands in for an engine that generates for all ranks. It has every sample's tokens and log-probs in tensors
like the embedded engine's. The rest is as in a run: samples are cut from the tensors, sent to their ranks, journaled,
scored, hashed and collated; then the groups are converted to a checkpoint's tensors and back. A separate row shows the
time in which the bundled tokenizer decodes texts for the rewards.
"""

import json
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from transformers import AutoTokenizer

import rlhf
from rlhf.config import DataConfig, FilterGroupsConfig, OverlongBufferConfig, RewardConfig
from rlhf.data import PromptSet, PromptStream
from rlhf.data.items import Row
from rlhf.data.tokens import LengthLimit
from rlhf.experience.collector import Collector
from rlhf.experience.generation import Generation
from rlhf.experience.groups import from_tensors, to_tensors
from rlhf.experience.journal import Journal
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.prompt_share import PromptShare
from rlhf.ranks import dims
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import Reward, RewardItem, Score
from rlhf.reward.failures import FailurePolicy
from rlhf.reward.weighted import Term
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.decoding import Decoding
from rlhf.rollout.exchange import gather_requests, scatter_samples

RANKS, N = 2, 8
FOLDER = Path(rlhf.__file__).parent / "models" / "tiny_policy"
T = TypeVar("T")
PHASES = ("samples and exchange", "journal", "rewards' texts", "digests, batch, metrics", "checkpoint's tensors")
Figures = dict[str, float]
CPU = ", CPU"


class Drawn(Decoding):
    """A finished decoding, whose tensors contain all samples."""

    def __init__(self, requests: Sequence[Request], tokens: Tensor, log_probs: Tensor) -> None:
        self.requests, self.total = requests, len(tokens)
        self.tokens, self.log_probs, self.device = tokens.int().numpy(), log_probs, torch.device("cpu")
        self.cache: Any = SimpleNamespace(span=SimpleNamespace(rows=0))
        self.max_rows = self.admitted = self.total
        self.counts = torch.full((self.total,), tokens.shape[1]).numpy()
        self.stopped = torch.zeros(self.total, dtype=torch.bool).numpy()


@dataclass
class StandIn:
    """A `RolloutEngine` that generates nothing: the leader has all samples ready."""

    coordinator: Coordinator
    tokens: Tensor
    log_probs: Tensor
    dtype: torch.dtype = torch.float32

    def update_weights(self, *_: object) -> None:
        """Do nothing: there are no weights."""

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        of_ranks = gather_requests(requests, range(RANKS), [0], self.coordinator)
        parts: list[list[Sample]] = []
        if self.coordinator.is_leader:
            every = [request for of_rank in of_ranks for request in of_rank]
            samples = iter(Drawn(every, self.tokens, self.log_probs).run(seed, step, 0))
            parts = [list(islice(samples, len(of_rank))) for of_rank in of_ranks]
        return scatter_samples(parts, self.coordinator)

    def listen(self, _: object) -> None:
        """Do nothing: all samples are complete at once."""

    def sleep(self) -> bool:
        return False

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing."""


class Lengths:
    """Rewards the length of the text."""

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        return [Score(float(len(item.response))) for item in items]

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Watch:
    """Measures each phase's wall seconds, and its processor seconds under the phase's name plus `CPU`."""

    seconds: Figures = field(default_factory=lambda: defaultdict(float))

    def timed(self, phase: str, function: Callable[..., T]) -> Callable[..., T]:
        """Wrap `function` so that its time counts for `phase`."""

        def run(*arguments: Any, **named: Any) -> T:
            wall, cpu = time.monotonic(), time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[phase] += time.monotonic() - wall
                self.seconds[phase + CPU] += time.process_time() - cpu

        return run


def memory(name: str) -> int:
    """Return `VmRSS` or `VmHWM` of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def collector_of(engine: StandIn, prompts: int, length: int, folder: Path) -> Collector:
    """Return the collector of a run with `engine` and a journal."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rows = [Row(i, f"row {i}", [{"role": "user", "content": f"{i}+{i}="}], "sums", "", {}) for i in range(prompts)]
    every = PromptSet.in_memory(rows, tokenizer, LengthLimit(128, "error", "data.train_files"))
    reward, data = RewardConfig(), DataConfig(train_batch_size=prompts)
    coordinator = engine.coordinator
    generation = Generation(
        PolicySampler(engine, SimpleNamespace(full_tensors=dict), 0),
        SamplingParams(max_tokens=length),
        N,
        False,
        Reward([Term("lengths", 1.0, Lengths(), FailurePolicy("lengths", reward))]),
        OverlongBufferConfig(),
        tokenizer,
        coordinator,
        prompts,
        Journal(folder, "run", "scores", coordinator),
    )
    share = PromptShare(PromptStream(every, seed=0, shuffle=True), prompts, dims.data())
    fixed = (data, FilterGroupsConfig(), reward, 0, 1)
    return Collector(*fixed, share, generation, torch.device("cpu"), ends_with=lambda *_: True)


def collect(rank: int, samples: int, length: int, folder: Path) -> Figures:
    """Collect one batch and return this rank's figures. Collective."""
    coordinator = Coordinator(GlooTransport())
    drawn = (samples, length) if rank == 0 else (0, 0)
    vocabulary = len(AutoTokenizer.from_pretrained(FOLDER))
    tokens = torch.randint(vocabulary, drawn)
    collector = collector_of(StandIn(coordinator, tokens, -torch.rand(drawn)), samples // N, length, folder)
    watch, generation = Watch(), collector.generation
    journal: Any = generation.journal
    journal.add_samples = watch.timed(PHASES[1], journal.add_samples)
    generation.sampler.generate = watch.timed(PHASES[0], generation.sampler.generate)  # type: ignore[method-assign]
    generation._results = watch.timed(PHASES[2], generation._results)  # type: ignore[method-assign]
    coordinator.all_gather(None)
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before, tokens_here = memory("VmRSS"), samples * length // RANKS
    collected = watch.timed("all", collector.collect)(1)
    for unit in ("", CPU):
        watch.seconds[PHASES[3] + unit] = watch.seconds["all" + unit] - sum(watch.seconds[p + unit] for p in PHASES[:3])
    peak, after = memory("VmHWM") - before, memory("VmRSS") - before
    batch = sum(value.nbytes for value in vars(collected.batch).values() if isinstance(value, Tensor))

    def through_checkpoint() -> None:
        if from_tensors(to_tensors(collected.groups)) != collected.groups:
            raise RuntimeError("the groups have changed on their way through a checkpoint")

    watch.timed(PHASES[4], through_checkpoint)()
    memories = {"held": (after - batch) / tokens_here, "batch": batch / tokens_here, "peak": peak}
    return watch.seconds | memories | {"checkpoint": memory("VmHWM") - before}


def _rank(rank: int, samples: int, length: int, folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    (folder / f"figures-{rank}").write_text(json.dumps(collect(rank, samples, length, folder)))


def measure(samples: int, length: int) -> list[Figures]:
    """Return the figures of each rank. An error on one rank ends all ranks."""
    with tempfile.TemporaryDirectory(prefix="rlhf-growth-") as folder:
        torch.multiprocessing.spawn(_rank, (samples, length, Path(folder)), RANKS)
        return [json.loads(Path(folder, f"figures-{rank}").read_text()) for rank in range(RANKS)]


def table(samples: int, length: int, repeats: int) -> str:
    """Return a table of medians over `repeats` runs."""
    runs = [measure(samples, length) for _ in range(repeats)]

    def row(name: str, value: Callable[[Figures], str]) -> str:
        return f"| {name} | {' | '.join(value(_median([run[rank] for run in runs])) for rank in range(RANKS))} |"

    def seconds(phase: str) -> Callable[[Figures], str]:
        return lambda figures: f"{figures[phase]:.2f} s ({figures[phase + CPU]:.2f} CPU)"

    lines = [f"{samples:,} samples of {length:,} tokens, {RANKS} ranks", "", "| | leader | other |", "|---|---|---|"]
    lines += [row(phase, seconds(phase)) for phase in ("all", *PHASES)]
    lines.append(row("bytes per token: samples", lambda figures: f"{figures['held']:.1f}"))
    lines.append(row("bytes per token: batch", lambda figures: f"{figures['batch']:.1f}"))
    lines.append(row("peak of the collection", lambda figures: f"{figures['peak'] / 1e6:,.0f} MB"))
    lines.append(row("peak with the checkpoint", lambda figures: f"{figures['checkpoint'] / 1e6:,.0f} MB"))
    return "\n".join(lines) + "\n"


def _median(of_runs: Sequence[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in of_runs) for name in of_runs[0]}
