"""python -m benchmarks.rollout_service: measures how busy rollout servers are, in virtual time.

The trainer's client, fleet loop and dispatch generate a batch on simulated servers, for three distributions of response
lengths (4 to 20,480 tokens) and several numbers of servers. Figures:

- live slots: running samples over slots, until the last sample has been sent
- time over best: virtual time divided by a perfect schedule's (the longest sample, or all tokens on all slots)
- groups: both figures if a server takes all samples of a prompt together
- moved, repeated: samples taken back from a server's queue, and samples sent again after a failure

With `--faults`, of every eight servers one decodes half as fast, one hangs and one dies. The slots of the last two do
not count.

Exits with 0 if at least 90 % of the slots are live in every row. Also prints the tokens per second that the client
parses and checks on one core.
"""

import argparse
import heapq
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.scripted_servers import LABEL, ScriptedServer, ServerSpeed, answer, generate
from rlhf.rollout.engine import Request, SamplingParams
from rlhf.rollout.servers.client import sample_of
from rlhf.rollout.vllm.requests import request_seed

LONGEST, LIVE = 20_480, 0.9
GROUP = 8  # samples of a prompt
ROUNDS = 4  # samples per slot


def lengths(name: str, seed: int) -> Iterator[int]:
    """Yield response lengths of the distribution `name`.

    `reasoning` is log-normal, `bimodal` has short answers and one in seven at the limit, `uniform` is uniform.
    """
    rng = random.Random(seed)
    while True:
        if name == "reasoning":
            yield min(LONGEST, max(4, int(rng.lognormvariate(math.log(2500), 1.0))))
        elif name == "bimodal":
            yield LONGEST if rng.random() < 1 / 7 else rng.randint(4, 2000)
        else:
            yield rng.randint(4, LONGEST)


def with_groups(of_requests: Sequence[int], servers: int, slots: int) -> tuple[float, float]:
    """Return live slots and time over best if a server takes a whole group once it has enough free slots.

    Every token takes the same time here.
    """
    free, now, busy = [slots] * servers, 0.0, []
    ends: list[tuple[float, int]] = []  # heap of the ends of groups, with their servers
    for start in range(0, len(of_requests), GROUP):
        group = of_requests[start : start + GROUP]
        while max(free) < GROUP:
            now, server = heapq.heappop(ends)
            free[server] += GROUP
        server = max(range(servers), key=free.__getitem__)
        free[server] -= GROUP
        heapq.heappush(ends, (now + max(group), server))
        busy += [(now, length) for length in group]
    live = sum(min(length, now - begun) for begun, length in busy) / (now * servers * slots)
    end = max(begun + length for begun, length in busy)
    return live, end / max(max(of_requests), sum(of_requests) / (servers * slots))


def row(name: str, servers: int, slots: int, faults: bool) -> list[float]:
    """Generate one batch and return its figures."""
    drawn = list(itertools.islice(lengths(name, seed=servers), servers * slots * ROUNDS))
    prompts = range(len(drawn) // GROUP)
    by_seed = {
        request_seed(1, 1, Request(uid, [], sample=i)): drawn[uid * GROUP + i] for uid in prompts for i in range(GROUP)
    }
    speed = ServerSpeed(slots=slots)
    slow = ServerSpeed(slots=slots, base_s=2 * speed.base_s, per_sample_s=2 * speed.per_sample_s)
    made = [
        ScriptedServer(slow if faults and i % 8 == 1 else speed, lambda body: by_seed[body["sampling_params"]["seed"]])
        for i in range(servers)
    ]
    failing = [server for i, server in enumerate(made) if faults and i % 8 in (2, 3)]
    at = [(200.0 + i, server.hang if i % 2 else server.die) for i, server in enumerate(failing)]
    params = SamplingParams(max_tokens=LONGEST)
    requests = [Request(uid, [uid] * 256, params, i) for uid in prompts for i in range(GROUP)]
    done = generate(made, requests, capacity=slots, max_failures=10**6, at=at)
    healthy = [server for server in made if server not in failing]
    dry = max(server.last_arrival for server in healthy)
    live = sum(server.running_until(dry) for server in healthy) / (dry * slots * len(healthy))
    step_s = speed.base_s + speed.per_sample_s * slots
    best = max(max(drawn) * (speed.base_s + speed.per_sample_s), sum(drawn) * step_s / (slots * servers))
    moved, repeated = (done.metrics[f"perf/requests_{kind}"] for kind in ("moved", "repeated"))
    return [live, done.seconds / best, *with_groups(drawn, servers, slots), moved, repeated]


def parse_rate(seconds: float = 2.0) -> float:
    """Return the tokens per second that the client parses and checks."""
    length = 4096
    content, request = answer(length, LABEL), Request(0, [1], SamplingParams(max_tokens=length))
    done, started = 0, time.process_time()
    while time.process_time() - started < seconds:
        sample_of(content, request, 10, LABEL, 1)
        done += length
    return done / (time.process_time() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_service", description=__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 64], help="numbers of servers")
    parser.add_argument("--slots", type=int, default=16, help="samples that a server decodes at the same time")
    parser.add_argument("--faults", action="store_true", help="with slow, hanging and dying servers")
    args = parser.parse_args(arguments)
    names = ("live slots", "time over best", "groups: live slots", "groups: time", "moved", "repeated")
    table = Table("lengths", "servers", *names)
    worst = 1.0
    for name in ("reasoning", "bimodal", "uniform"):
        for servers in args.servers:
            figures = row(name, servers, args.slots, args.faults)
            worst = min(worst, figures[0])
            forms = (".1%", ".2f", ".1%", ".2f", ".0f", ".0f")
            table.add_row(name, str(servers), *(f"{value:{form}}" for value, form in zip(figures, forms, strict=True)))
    console = Console()
    console.print(table)
    console.print(f"The client parses and checks {parse_rate():,.0f} tokens per second on one core.")
    return 0 if worst >= LIVE else 1


if __name__ == "__main__":
    sys.exit(main())
