"""Samples responses from the current policy."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from rlhf.backends.base import PolicyWeights
from rlhf.experience.engine_probe import check_probe, probe_request
from rlhf.rollout import AdapterEngine, BackgroundEngine, Request, RolloutEngine, Sample
from rlhf.rollout.engine import Listener, PartialEngine, Quota


@dataclass
class PolicySampler:
    """Samples responses from the current policy.

    Syncs the weights to the engine only if they have changed, or if the engine released its weights in a sleep.
    """

    engine: RolloutEngine
    actor: PolicyWeights
    seed: int
    native_adapters: bool = False
    """Whether `engine` is an `AdapterEngine`, which receives the base weights once and then only the adapters."""
    background: bool = False
    """Whether `engine` is a `BackgroundEngine`, which generates while the ranks train."""
    seconds: float = field(default=0.0, init=False)
    """Seconds of generation on this rank so far. Without weight syncs, because ranks wait for each other in a sync."""
    sync_seconds: float = field(default=0.0, init=False)
    """Seconds of weight syncs since the last call of `metrics`."""
    _version: int | None = field(default=None, init=False)
    runs: bool = field(default=False, init=False)
    """Whether a generation runs in the background."""
    _probed: bool = field(default=False, init=False)
    _stopped: list[Sample] = field(default_factory=list, init=False)
    """Samples of the generation in the background, if `generate` stopped it."""

    def generate_until(
        self,
        requests: Sequence[Request],
        quotas: Sequence[Quota],
        *,
        version: int,
        step: int,
        listener: Listener | None = None,
    ) -> list[Sample]:
        """Return samples like `generate`, some of them partial, once every quota is reached. Collective.

        `engine` must be a `PartialEngine`. With `background`, the engine continues the partial samples until `stop`.
        """
        self.stop()
        self._sync_weights(version)
        started = time.monotonic()
        with self._listening(listener):
            samples = cast(PartialEngine, self.engine).generate_until(requests, quotas, seed=self.seed, step=step)
        self.seconds += time.monotonic() - started
        self.runs = self.background
        return samples

    def generate(
        self, requests: Sequence[Request], *, version: int, step: int, listener: Listener | None = None
    ) -> list[Sample]:
        """Return this rank's samples by the policy after `version` steps, with noise keyed by `step`. Collective.

        `listener` may get samples before the others are complete (see `RolloutEngine.listen`).

        The first call raises UserError if the engine lost tensors in its sleep.
        """
        self._stopped = self.stop()
        if not self._probed:
            self._probe(version, step)
        self._sync_weights(version)
        started = time.monotonic()
        with self._listening(listener):
            samples = self.engine.generate(requests, seed=self.seed, step=step)
        self.seconds += time.monotonic() - started
        return samples

    @contextmanager
    def _listening(self, listener: Listener | None) -> Iterator[None]:
        if listener is None:
            yield
            return
        self.engine.listen(listener)
        try:
            yield
        finally:
            self.engine.listen(None)

    def _probe(self, version: int, step: int) -> None:
        """Compare the engine with the actor, if the engine releases its weights in a sleep."""
        self._probed = True
        if not self.engine.sleep():
            return
        self._sync_weights(version)
        (sample,) = self.engine.generate([probe_request()], seed=self.seed, step=step)
        # The actor's forward pass needs the memory that the engine uses.
        self.sleep()
        check_probe(self.actor, sample)

    def begin(self, requests: Sequence[Request], *, version: int, step: int) -> None:
        """Start to generate in the background, until `stop`. Collective."""
        self._sync_weights(version)
        cast(BackgroundEngine, self.engine).begin(requests, seed=self.seed, step=step)
        self.runs = True

    def exchange(self, requests: Sequence[Request], *, wait: bool) -> list[Sample]:
        """Add requests to the background generation. Return this rank's newly complete samples. Collective.

        Newly complete means since the last call (see `BackgroundEngine.exchange`).
        """
        started = time.monotonic()
        samples = cast(BackgroundEngine, self.engine).exchange(requests, wait=wait)
        self.seconds += time.monotonic() - started
        return samples

    def stop(self) -> list[Sample]:
        """End the generation in the background, if there is one. Return its samples, some of them partial. Collective.

        After `generate`, return the samples of the generation that `generate` stopped.
        """
        stopped, self._stopped = self._stopped, []
        if not self.runs:
            return stopped
        started = time.monotonic()
        self.runs = False
        stopped = cast(BackgroundEngine, self.engine).stop()
        self.seconds += time.monotonic() - started
        return stopped

    def _sync_weights(self, version: int) -> None:
        started = time.monotonic()
        if version != self._version:
            # Cast before the gather: with a bfloat16 engine the cast halves the bytes.
            actor, dtype = self.actor, self.engine.dtype
            if self.native_adapters:
                engine = cast(AdapterEngine, self.engine)
                engine.update_adapters(actor.base_tensors, partial(actor.adapter_tensors, dtype), version)
            else:
                self.engine.update_weights(partial(actor.full_tensors, dtype), version)
            self._version = version
        self.sync_seconds += time.monotonic() - started

    def sleep(self) -> None:
        """Release the engine's device memory for training until the next generation. Collective."""
        if self.engine.sleep():
            self._version = None

    def metrics(self) -> dict[str, float]:
        """Return metrics of the engine and of this rank's weight syncs since the last call."""
        seconds, self.sync_seconds = self.sync_seconds, 0.0
        return {"timing_s/update_weights": seconds} | self.engine.metrics()

    def invalidate_weights(self) -> None:
        """Sync the weights before the next generation, because after a rollback the same version has other weights."""
        self._version = None
