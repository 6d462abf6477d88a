"""python -m benchmarks.environments: measures the trainer's episodes with tools against an ideal schedule.

The episodes, their environment processes and the sampler are the trainer's own; only the engine is a stand-in. It
decodes at most `--slots` samples at once, and each token takes `--token-ms`. Like rollout servers, it takes new
requests at any time ("servers"), or it generates one turn of all live episodes, like an engine in the ranks ("ranks").
A turn has 64 tokens on average: always ("equal"), or log-normal between 16 and 256 ("skewed"). Each turn but the last
calls a tool that waits for `--tool-ms`. Figures are medians of `--rounds` runs:

- time over ideal: no schedule is faster than the ideal, whose engine is busy until the end, or whose longest episode
  never waits
- processor time per turn of the rank, without the stand-in, and of all environment processes
- turn by turn: our simulation of the loop in TRL's GRPOTrainer, without any processor time, over the ideal. The loop
  generates a turn of all live episodes, then calls their tools, one episode after the other. (It gathers the async
  tools of one turn only.)
- gathered: the same loop, with the tools of all episodes called at once

`--textarena` plays 32 games of GuessTheNumber instead, each in a process of its own; the ideal's tools take no time.

Exits with 0 if the rows of servers take at most 1.2 times the ideal, and the rank less than 1 ms per turn in all rows.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.figures import spread
from rlhf.config.schema.env import EnvConfig
from rlhf.data import Prompt
from rlhf.data.turns.chat_turns import ChatTurns
from rlhf.environments import adapters
from rlhf.environments.sessions import EnvironmentPool
from rlhf.errors import UserError
from rlhf.experience.episode import EnvironmentClass, Episode, Stage
from rlhf.experience.episodes import Asked, Episodes
from rlhf.experience.journal import Journal
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.models import tiny
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.engine import Listener
from rlhf.rollout.servers.server_engine import EXCHANGE_S

TOOL = f"{Path(__file__).with_name('environment_tool.py')}:Waiting"
GAME = f"{Path(adapters.__file__).with_name('textarena_game.py')}:TextArena"
MEAN, SHORTEST, LONGEST = 64, 16, 256  # tokens of a turn
GROUP = 8  # episodes of a prompt
MOST, MOST_MS = 1.2, 1.0
NEWS_S = 0.1  # seconds between two calls of a listener
ENGINES = ("servers", "ranks")
TextOf = Callable[[int, bool], str]
"""Returns the text of turn i, counted from 0. The flag marks an episode's last turn."""


@dataclass(frozen=True)
class Work:
    """Episodes to play: `tokens[i]` are the tokens of each turn of episode i."""

    tokens: Sequence[Sequence[int]]
    slots: int
    token_s: float
    tool_s: float

    @classmethod
    def of(cls, lengths: str, episodes: int, turns: int, **settings: Any) -> "Work":
        rng = random.Random(1)

        def draw() -> int:
            drawn = MEAN if lengths == "equal" else int(rng.lognormvariate(math.log(48), 0.75))
            return min(LONGEST, max(SHORTEST, drawn))

        return cls([[draw() for _ in range(turns)] for _ in range(episodes)], **settings)

    @property
    def ideal_s(self) -> float:
        """Seconds of an engine that is always busy, or of the longest episode, whichever is longer."""
        busy = sum(map(sum, self.tokens)) / self.slots
        return max(busy * self.token_s, *(sum(of) * self.token_s + (len(of) - 1) * self.tool_s for of in self.tokens))

    def turn_by_turn_s(self, *, gathered: bool) -> float:
        """Seconds of a loop that alternates between the engine and the tools, without processor time."""
        total = 0.0
        for turn in itertools.zip_longest(*self.tokens):
            lengths = [length for length in turn if length is not None]
            total += max(ends(lengths, self.slots)) * self.token_s
        calls = [len(of) - 1 for of in self.tokens]
        return total + (max(calls) if gathered else sum(calls)) * self.tool_s


@dataclass(frozen=True)
class BenchmarkCase:
    """A row of the table."""

    engine: str
    lengths: str
    work: Work


def ends(lengths: Sequence[int], slots: int) -> list[int]:
    """Return the time at which each of the samples ends, in tokens. Samples begin in order, once a slot is free."""
    free = [0] * min(slots, len(lengths))
    found = []
    for length in lengths:
        found.append(heapq.heappop(free) + length)
        heapq.heappush(free, found[-1])
    return found


@dataclass
class StandInEngine:
    """A `RolloutEngine` that writes the given texts, in the time that `work` sets."""

    work: Work
    tokenizer: Any
    text_of: TextOf
    dtype: torch.dtype = torch.float32
    own_s: float = 0.0
    """Processor time of this object so far, without the listener's."""
    turns: int = 0
    _listener: Listener | None = None
    _free: list[float] = field(default_factory=list)  # heap of the times at which busy slots become free
    _running: list[tuple[float, int, Sample]] = field(default_factory=list)
    _last: float = 0.0  # time at which the last sample so far is complete
    _written: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def update_weights(self, *_: object) -> None:
        """Do nothing: there are no weights."""

    def sleep(self) -> bool:
        return False

    def listen(self, listener: Listener | None) -> None:
        self._listener = listener

    @cached_property
    def _filler(self) -> int:
        (token,) = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        return token

    @cached_property
    def _end(self) -> int:
        return self.tokenizer.convert_tokens_to_ids(tiny.END)

    def _turn(self, text: str, length: int) -> list[int]:
        """Return `length` tokens, which end with the text and the end of the turn."""
        if (text, length) not in self._written:
            tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self._end]
            self._written[text, length] = [self._filler] * (length - len(tokens)) + tokens
        return self._written[text, length]

    def _answer(self, request: Request) -> Sample:
        done = len(request.response.observations) if request.response is not None else 0
        lengths = self.work.tokens[request.uid * GROUP + request.sample]
        tokens = self._turn(self.text_of(done, done + 1 == len(lengths)), lengths[done])
        return request.answered(tokens, [-0.5] * len(tokens), "stop", 0)

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        """Generate as an engine in the ranks with a listener, which hears of complete samples every 0.1 s."""
        started, self._free = time.monotonic(), []
        at = self._begin(requests, started)
        waiting = sorted(range(len(at)), key=lambda i: at[i][0])
        last = max((end for end, _ in at), default=started)
        for tick in itertools.count(1):
            until = min(started + tick * NEWS_S, last)
            time.sleep(max(0.0, until - time.monotonic()))
            if time.monotonic() >= last:
                return [sample for _, sample in at]
            news = [i for i in waiting if at[i][0] <= until]
            waiting = waiting[len(news) :]
            if self._listener is not None:
                self._listener([at[i][1] for i in news])
        raise AssertionError

    def begin(self, requests: Sequence[Request], *, seed: int, step: int) -> None:
        self._free, self._running = [], []

    def exchange(self, requests: Sequence[Request], *, wait: bool) -> list[Sample]:
        """Generate as rollout servers, which return the complete samples after `EXCHANGE_S`, or once all are."""
        now = time.monotonic()
        for end, sample in self._begin(requests, now):
            heapq.heappush(self._running, (end, id(sample), sample))
            self._last = max(self._last, end)
        if wait:
            time.sleep(max(0.0, min(now + EXCHANGE_S, self._last if self._running else math.inf) - time.monotonic()))
        began, found = time.thread_time(), []
        while self._running and self._running[0][0] <= time.monotonic():
            found.append(heapq.heappop(self._running)[2])
        self.own_s += time.thread_time() - began
        return found

    def stop(self) -> list[Sample]:
        return []

    def _begin(self, requests: Sequence[Request], now: float) -> list[tuple[float, Sample]]:
        """Return the sample of each request, and the time at which it will be complete."""
        began = time.thread_time()
        samples = [self._answer(request) for request in requests]
        free = self._free
        found = []
        for request, sample in zip(requests, samples, strict=True):
            start = heapq.heappop(free) if len(free) == self.work.slots else now
            found.append((max(start, now) + (len(sample) - request.start) * self.work.token_s, sample))
            heapq.heappush(free, found[-1][0])
        self.own_s += time.thread_time() - began
        self.turns += len(requests)
        return found


def call(turn: int, last: bool) -> str:
    return "Done." if last else f"<look({turn})>"


def guess(turn: int, last: bool) -> str:
    return f"[{turn + 1}]"


@contextmanager
def player(
    work: Work, config: EnvConfig, text_of: TextOf, engine_name: str
) -> Iterator[tuple[Episodes, StandInEngine]]:
    """Start the environments and return the trainer's player of episodes, with a stand-in for the engine."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.FOLDER)
    engine = StandInEngine(work, tokenizer, text_of)
    actor: Any = SimpleNamespace(full_tensors=tuple)
    sampler = PolicySampler(engine, actor, seed=1, background=engine_name == "servers")  # type: ignore[arg-type]
    with closing(EnvironmentPool(config)) as pool:
        (definition,) = pool.start().definitions
        chat = ChatTurns(tokenizer, definition.tools)
        kinds = [EnvironmentClass(0, definition, lambda tools: chat)]
        yield Episodes(config, kinds, pool, sampler, Coordinator(GlooTransport()), 1, 4096, tokenizer), engine


def environments_s(pool: EnvironmentPool) -> float:
    """Return the processor time of the living environment processes so far, in seconds."""
    assert pool._host._popen is not None
    host = psutil.Process(pool._host._popen.pid)
    times = [each.cpu_times() for each in (host, *host.children(recursive=True))]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def play(episodes: Episodes, engine: StandInEngine, journal: Journal | None) -> tuple[dict[str, float], list[Episode]]:
    """Play all episodes and return figures."""
    work = engine.work
    message = {"role": "user", "content": "Search the places."}
    prompts = [Prompt(i, [message], [1], "", None, {}) for i in range(-(-len(work.tokens) // GROUP))]
    params, left = SamplingParams(max_tokens=1 << 20), len(work.tokens)
    asked = []
    for prompt in prompts:
        asked.append(Asked(prompt.index, prompt, [params] * min(GROUP, left)))
        left -= GROUP
    engine.own_s, engine.turns = 0.0, 0
    environments, rank, wall = environments_s(episodes.pool), time.process_time(), time.monotonic()
    played = episodes.play(asked, version=0, step=1, journal=journal)
    wall, rank = time.monotonic() - wall, time.process_time() - rank - engine.own_s
    environments = environments_s(episodes.pool) - environments
    finished = [episode for group in played for episode in group]
    # A game may end early, by a lucky guess.
    turns = [tokens[: episode.turn] for tokens, episode in zip(work.tokens, finished, strict=True)]
    figures = {
        "time over ideal": wall / replace(work, tokens=turns).ideal_s,
        "rank, ms per turn": 1e3 * rank / engine.turns,
        "environments, ms per turn": 1e3 * environments / engine.turns,
    }
    return figures, finished


def measured(case: BenchmarkCase, config: EnvConfig, text_of: TextOf, journal: bool) -> dict[str, float]:
    """Play all episodes with new environment processes, and return figures. Raise RuntimeError for a wrong episode."""
    work = case.work
    with player(work, config, text_of, case.engine) as (episodes, engine), tempfile.TemporaryDirectory() as folder:
        engine.work = Work([[SHORTEST] * len(work.tokens[0])] * GROUP, GROUP, 1e-4, work.tool_s)
        play(episodes, engine, None)  # compiles the chat template and starts the processes
        engine.work, stored = work, None
        if journal:
            stored = Journal(Path(folder), "benchmark", "", episodes.coordinator)
            stored.begin(1, 0, None)
        figures, played = play(episodes, engine, stored)
    calls = [len(of) - 1 for of in work.tokens]
    if any(episode.failures or episode.phase is not Stage.DONE for episode in played):
        raise RuntimeError(f"an episode failed: {[episode.failures for episode in played]}")
    if text_of is call and [episode.rewards for episode in played] != [[float(count)] for count in calls]:
        raise RuntimeError("an episode did not make one call in each turn but the last")
    return figures


def cases(args: argparse.Namespace) -> Iterator[BenchmarkCase]:
    settings = {"token_s": args.token_ms / 1000, "tool_s": 0.0 if args.textarena else args.tool_ms / 1000}
    for engine in args.engines:
        for slots in args.slots:
            for lengths in ("equal", "skewed"):
                yield BenchmarkCase(
                    engine, lengths, Work.of(lengths, args.episodes, args.turns, slots=slots, **settings)
                )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.environments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--episodes", type=int, help="concurrent episodes (default 512, with --textarena 32)")
    parser.add_argument("--turns", type=int, default=8, help="turns of an episode (default 8)")
    parser.add_argument("--tool-ms", type=float, default=50.0, help="milliseconds of a tool call (default 50)")
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[128, 512], help="samples that the engine decodes at once"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="kinds of engines")
    parser.add_argument("--token-ms", type=float, default=20.0, help="milliseconds of a token (default 20)")
    parser.add_argument("--concurrent", type=int, default=EnvConfig().max_concurrent, help="env.max_concurrent")
    parser.add_argument("--journal", action="store_true", help="with checkpoint.journal=true")
    parser.add_argument("--textarena", action="store_true", help="play games of textarena, which must be installed")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case (default 3)")
    args = parser.parse_args(arguments)
    args.episodes = args.episodes or (32 if args.textarena else 512)
    torch.set_num_threads(1)
    if args.textarena:
        kwargs, text_of = {"id": "GuessTheNumber-v0"}, guess
        config = EnvConfig([GAME], kwargs, max_turns=args.turns, max_concurrent=args.concurrent, process="episode")
    else:
        config, text_of = EnvConfig([TOOL], {"tool_ms": args.tool_ms}, max_concurrent=args.concurrent), call
        config.max_turns = args.turns
    rows = list(cases(args))
    figures: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    try:
        for _ in range(args.rounds):
            for i, case in enumerate(rows):
                for name, value in measured(case, config, text_of, args.journal).items():
                    figures[i][name].append(value)
    except UserError as error:
        Console(stderr=True).print(str(error), markup=False, soft_wrap=True)
        return 2
    return report(rows, figures)


def report(rows: Sequence[BenchmarkCase], figures: dict[int, dict[str, list[float]]]) -> int:
    """Print the table, and return 1 if a goal is missed."""
    table = Table("engine", "turns", "slots", "ideal, s", *figures[0], "turn by turn", "gathered")
    for i, case in enumerate(rows):
        work = case.work
        loops = [f"{work.turn_by_turn_s(gathered=gathered) / work.ideal_s:.2f}" for gathered in (False, True)]
        cells = [spread(values, ".2f") for values in figures[i].values()]
        table.add_row(case.engine, case.lengths, str(work.slots), f"{work.ideal_s:.1f}", *cells, *loops)
    Console(width=160).print(table)
    served = [figures[i]["time over ideal"] for i, case in enumerate(rows) if case.engine == "servers"]
    over = max(map(statistics.median, served), default=0.0)
    rank = max(statistics.median(of["rank, ms per turn"]) for of in figures.values())
    return 1 if over > MOST or rank > MOST_MS else 0


if __name__ == "__main__":
    sys.exit(main())
