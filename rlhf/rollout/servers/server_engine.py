"""Samples from vLLM servers in separate processes; the leader calls the servers for all ranks."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from rlhf.config import RolloutConfig
from rlhf.errors import UserError
from rlhf.events import announce
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.world import ranks_here
from rlhf.rollout.engine import Listener, Quota, Request, Weights
from rlhf.rollout.exchange import gather_requests, scatter_samples
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.sample import Sample
from rlhf.rollout.servers.client import RequestSettings
from rlhf.rollout.servers.fleet import Fleet
from rlhf.rollout.servers.fleet_loop import FleetLoop, FleetState
from rlhf.rollout.servers.keeper import keeper_of_this_run
from rlhf.rollout.servers.secret import Secret, run_secret
from rlhf.rollout.servers.server_process import ServerProcess
from rlhf.rollout.servers.weights.push import Pushed, WeightPush
from rlhf.storage.file_parts import FileParts, whole_in_files
from rlhf.storage.files import make_dir

log = logging.getLogger(__name__)
T = TypeVar("T")
KEEP_ALIVE_S = 20.0
"""Interval in seconds between keep-alives from the leader to the waiting ranks, so that no timeout fires."""
NEWS_S = 0.25
"""Interval in seconds at which ranks with a listener receive their newly completed samples."""
EXCHANGE_S = 0.03
"""Longest wait in seconds for newly completed samples in `exchange`."""


class ServerEngine:
    """A `BackgroundEngine`. On the leader, `resources` closes `fleet` and `weight_push`; elsewhere both are None."""

    def __init__(
        self,
        coordinator: Coordinator,
        fleet: Fleet | None,
        weight_push: WeightPush | None,
        resources: ExitStack,
        dtype: torch.dtype,
        parts: FileParts,
        run_id: str,
    ) -> None:
        self.dtype = dtype
        self._parts, self._run_id = parts, run_id
        self._coordinator, self._fleet, self._weight_push, self._resources = coordinator, fleet, weight_push, resources
        self._weights: Weights | None = None
        self._version = 0
        self._label = ""  # label of the wanted weights; empty until their digests are known
        self._listener: Listener | None = None
        self._sizes: list[int] = []  # on the leader: each rank's number of requests in `begin`
        self._owners: list[int] = []  # on the leader: the rank of each request in the current generation

    def update_weights(self, weights: Weights, version: int) -> None:
        """Push the weights to all live servers that lack them.

        A server that comes up later gets the weights before it serves.
        """
        self._weights, self._version, self._label = weights, version, ""
        self._push()

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        """Return the sample of each of this rank's requests, in order. Raises the errors of `Fleet.wait`."""
        self.generate_until(requests, (), seed=seed, step=step)
        return self.stop()

    def generate_until(
        self, requests: Sequence[Request], quotas: Sequence[Quota], *, seed: int, step: int
    ) -> list[Sample]:
        """Return the sample of each of this rank's requests as soon as all ranks' quotas are reached.

        The servers continue unfinished requests. The sample of such a request is partial and has only the tokens that
        the request began with. Raises the errors of `Fleet.wait`.
        """
        self.begin(requests, quotas, seed=seed, step=step)
        # A server that restarted receives the weights at once.
        while self._outcome() == "weights":
            self._push()
        return self._samples(FleetLoop.samples)

    def begin(self, requests: Sequence[Request], quotas: Sequence[Quota] = (), *, seed: int, step: int) -> None:
        """Start to generate in the background, until `stop`."""
        announce("rollout.begin")
        self._push()  # servers that came up since the last update lack the weights
        of_ranks = gather_requests(requests, range(self._coordinator.world_size), [0], self._coordinator)
        all_quotas = list(chain.from_iterable(self._coordinator.all_gather(list(quotas))))
        self._sizes = [len(of_rank) for of_rank in of_ranks]
        self._owners = [rank for rank, size in enumerate(self._sizes) for _ in range(size)]
        all_requests = list(chain.from_iterable(of_ranks))
        self._on_leader(lambda fleet: fleet.do(lambda loop: loop.begin(all_requests, seed, step, all_quotas)))

    def exchange(self, requests: Sequence[Request], *, wait: bool) -> list[Sample]:
        """Add requests to the generation, and return this rank's samples completed since the last call."""
        of_ranks = gather_requests(requests, range(self._coordinator.world_size), [0], self._coordinator)
        self._owners += [rank for rank, of_rank in enumerate(of_ranks) for _ in of_rank]
        added = list(chain.from_iterable(of_ranks))

        def extend_and_wait(fleet: Fleet) -> FleetState | None:
            if added:
                fleet.do(lambda loop: loop.extend(added))
            return fleet.wait(EXCHANGE_S if wait else 0.0)

        outcome = self._on_leader(extend_and_wait)
        if outcome == "weights":
            self._push()
        samples = self._news()
        if outcome == "done" and wait and not samples:
            time.sleep(EXCHANGE_S)  # all samples were returned earlier, so the environments are at work
        return samples

    def stop(self) -> list[Sample]:
        """Stop the generation, and return the sample of each of this rank's requests in `begin`.

        An unfinished sample is partial and has the tokens so far. If a server fails, the tokens of its unfinished
        samples are lost.
        """
        self._on_leader(lambda fleet: fleet.do(FleetLoop.stop))
        self._outcome()
        return self._samples(FleetLoop.pop_samples)

    def _samples(self, of_all: Callable[[FleetLoop], list[Sample]]) -> list[Sample]:
        """Return this rank's part of the samples. Collective."""
        parts: list[list[Sample]] = []

        def split_by_rank(fleet: Fleet) -> None:
            samples = iter(fleet.do(of_all))
            parts.extend(list(islice(samples, size)) for size in self._sizes)

        self._on_leader(split_by_rank)
        return scatter_samples(parts, self._coordinator)

    def _news(self) -> list[Sample]:
        """Return this rank's samples completed since the last call. Collective."""
        parts: list[list[Sample]] = []

        def split_by_rank(fleet: Fleet) -> None:
            parts.extend([] for _ in range(self._coordinator.world_size))
            for index, sample in fleet.do(FleetLoop.pop_news).items():
                parts[self._owners[index]].append(sample)

        self._on_leader(split_by_rank)
        return scatter_samples(parts, self._coordinator)

    def listen(self, listener: Listener | None) -> None:
        self._listener = listener

    def sleep(self) -> bool:
        """Return False: the servers have their own devices."""
        return False

    def metrics(self) -> dict[str, float]:
        if self._fleet is None or self._weight_push is None:
            return {}
        sent, self._weight_push.sent_bytes = self._weight_push.sent_bytes, 0
        return self._fleet.do(FleetLoop.metrics) | {"perf/sync_bytes": float(sent)}

    def close(self) -> None:
        self._resources.close()

    def wait_until_ready(self) -> None:
        """Return once a server is alive. Collective."""
        self._outcome(generating=False)

    def _outcome(self, *, generating: bool = True) -> FleetState:
        """Return the state that the fleet reaches. Collective."""
        interval_s = KEEP_ALIVE_S if self._listener is None else NEWS_S
        while True:
            outcome = self._on_leader(lambda fleet: fleet.wait(interval_s, generating=generating))
            if outcome is not None:
                return outcome
            if self._listener is not None:
                self._listener(self._news())
            if generating:  # so that the watchdog waits for a restart of servers; the fleet has its own deadlines
                announce("rollout.wait")

    def _on_leader(self, action: Callable[[Fleet], T]) -> T:
        """Return the leader's result of `action` on every rank, or raise its error on every rank."""

        def lead() -> T:
            assert self._fleet is not None
            return action(self._fleet)

        return self._coordinator.on_leader(lead)

    def _push(self) -> None:
        """Make all live servers serve the current weights. Collective."""
        name = f"{self._run_id}.step_{self._version}"
        begun = self._label or name
        labels = self._on_leader(lambda fleet: fleet.do(lambda loop: loop.begin_push(begun, self._version)))
        if not labels:
            return
        announce("rollout.push")
        if not self._label and any(label.startswith(f"{name}.") for label in labels.values()):
            self._label = self._walk(self._weights, lambda push, tensors: push.label(tensors, name), "")
        # An empty label means "unknown", both for a server and for the current weights.
        errors = self._adopt([url for url, label in labels.items() if label and label == self._label])
        if others := {url: label for url, label in labels.items() if url not in errors}:
            pushed = self._send_weights(others, name)
            assert self._label in ("", pushed.label), "the weights changed without update_weights"
            self._label, errors = pushed.label, errors | pushed.errors
        self._on_leader(lambda fleet: fleet.do(lambda loop: loop.end_push(self._label, errors)))

    def _send_weights(self, labels: Mapping[str, str], name: str) -> Pushed:
        """Send the weights to the servers of `labels` (URL -> last known label). Collective."""
        return self._walk(self._weights, lambda push, tensors: push.send(list(labels), tensors, name), Pushed("", {}))

    def _adopt(self, urls: Sequence[str]) -> dict[str, str | None]:
        """Make servers that already have the current weights serve them. Return their errors. Collective."""

        def adopt(fleet: Fleet) -> dict[str, str | None]:
            assert self._weight_push is not None
            log.info("Rollout servers %s still have the weights %r.", ", ".join(urls), self._label)
            return self._weight_push.adopt(urls)

        return self._on_leader(adopt) if urls else {}

    def _walk(
        self, weights: Weights | None, action: Callable[[WeightPush, Iterable[tuple[str, Tensor]]], T], elsewhere: T
    ) -> T:
        """Return the leader's result of `action` on the weights, which all ranks gather. Collective.

        Args:
            elsewhere: placeholder for the result on the other ranks.
        """
        assert weights is not None, "generation needs weights"

        def walk() -> T:
            if self._weight_push is not None:
                return action(self._weight_push, whole_in_files(weights(), self._parts))
            for _ in weights():
                pass
            return elsewhere

        return self._coordinator.everywhere(walk)[0]


def build_server_engine(
    config: RolloutConfig,
    policy: PolicyFiles,
    coordinator: Coordinator,
    device: torch.device,
    *,
    logs: Path,
    run_id: str,
    parts: FileParts | None = None,
    engine_class: type[ServerEngine] = ServerEngine,
    push_class: Callable[[RolloutConfig, torch.device, Secret], WeightPush] = WeightPush,
    adapter_rank: int | None = None,
) -> ServerEngine:
    """Build the engine, and wait for at least one live server. Collective.

    Args:
        logs: folder for the run's secret, and for the logs of servers that this run starts.
        run_id: part of the labels, so that a server of another run does not count as one with this run's weights.
        parts: for each weight that the trainer and vLLM store fused, such as experts, its Hugging Face tensors.
        adapter_rank: as in `RequestSettings`.

    Raises:
        UserError: too few GPUs for the servers, an invalid secret, or a server that must be started differently
            (`Admission.check`).
        ServersFailed: no server started (rollout.servers.max_failures).
    """
    resources = ExitStack()
    try:
        of_leader: list[tuple[Fleet, WeightPush]] = []

        def start() -> None:
            processes: dict[Path, ServerProcess] = {}
            secret = run_secret(logs / "secret")
            if not config.servers.urls:
                processes = _own_servers(config, policy, device, secret, logs, resources)
            weight_push = push_class(config, device, secret)
            resources.callback(weight_push.close)
            requests = _request_settings(config, policy, adapter_rank)
            fleet = Fleet(FleetLoop(config.servers, processes, requests, secret, capacity=config.max_num_seqs))
            resources.callback(fleet.close)
            log.info("Waiting for the first of %d rollout servers.", len(processes) or len(config.servers.urls))
            of_leader.append((fleet, weight_push))

        coordinator.on_leader(start)
        fleet, weight_push = of_leader[0] if of_leader else (None, None)
        engine = engine_class(
            coordinator, fleet, weight_push, resources, getattr(torch, config.engine_dtype), parts or {}, run_id
        )
        engine.wait_until_ready()
    except BaseException:
        resources.close()
        raise
    return engine


def _request_settings(config: RolloutConfig, policy: PolicyFiles, adapter_rank: int | None) -> RequestSettings:
    return RequestSettings(
        policy.eos,
        config.structured_outputs,
        policy.vocab_size,
        policy.tokenizer,
        adapter_rank,
        policy.max_model_len,
        config.sampling_mask,
    )


def _own_servers(
    config: RolloutConfig, policy: PolicyFiles, device: torch.device, secret: Secret, logs: Path, resources: ExitStack
) -> dict[Path, ServerProcess]:
    """Return the servers that this run starts, by log file. `resources` closes the keeper, which runs them."""
    gpus = server_gpus(config, device)
    policy.write()
    make_dir(logs)
    keeper = keeper_of_this_run()
    resources.callback(keeper.close)
    paths = [logs / f"server_{i}.log" for i in range(len(gpus))]
    return {
        path: ServerProcess(config, policy.folder, policy.max_model_len, device, of_server, secret, path, keeper)
        for path, of_server in zip(paths, gpus, strict=True)
    }


def server_gpus(config: RolloutConfig, device: torch.device) -> list[list[str]]:
    """Return the GPUs of each server that this run starts, as in CUDA_VISIBLE_DEVICES; none on a CPU.

    The servers get the GPUs after those of the ranks. Raises UserError for too few GPUs.
    """
    count, size = config.servers.count, config.tensor_model_parallel_size
    if device.type != "cuda":
        return [[] for _ in range(count)]
    ranks, found = ranks_here(), torch.cuda.device_count()
    needed = ranks + count * size
    if found == 1 < ranks:
        raise UserError(
            f"rollout.servers.count={count}: the servers need other GPUs than the {ranks} ranks, but this rank "
            "sees one GPU, its own. Let each rank see all GPUs of its machine (in Slurm, --gpus-per-node instead of "
            "--gpus-per-task), or set rollout=vllm, which shares the ranks' GPUs."
        )
    if found < needed:
        raise UserError(
            f"rollout.servers.count={count}: with rollout.tensor_model_parallel_size={size} the servers need "
            f"{count * size} GPUs of their own, in addition to those of the {ranks} ranks (trainer.nproc), but this "
            f"machine has {found}. Set trainer.nproc={max(1, found - count * size)}, fewer servers, or rollout=vllm, "
            "which shares the ranks' GPUs."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(found)]
    return [names[first : first + size] for first in range(ranks, needed, size)]
