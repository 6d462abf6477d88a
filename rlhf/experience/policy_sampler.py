"""Samples responses from the current policy."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from rlhf.backends.base import PolicyWeights
from rlhf.experience.engine_probe import check_probe, probe_request
from rlhf.rollout import AdapterEngine, BackgroundEngine, Request, RolloutEngine, Sample
from rlhf.rollout.engine import PartialEngine, Quota


@dataclass
class PolicySampler:
    """Samples responses from the current policy; syncs the weights to the engine only when they have changed."""

    engine: RolloutEngine
    actor: PolicyWeights
    seed: int
    native_adapters: bool = False
    """Whether `engine` is an `AdapterEngine`, which receives the base weights once and then only the adapters."""
    seconds: float = field(default=0.0, init=False)
    """Seconds of generation on this rank so far. Weight syncs do not count, because ranks wait for each other there."""
    sync_seconds: float = field(default=0.0, init=False)
    """Seconds of weight syncs since the last call of `metrics`."""
    _version: int | None = field(default=None, init=False)
    _runs: bool = field(default=False, init=False)
    _probed: bool = field(default=False, init=False)
    # Samples that `begin` started, if `generate` was called before `finish`.
    _finished: list[Sample] | None = field(default=None, init=False)

    def generate_until(
        self, requests: Sequence[Request], quotas: Sequence[Quota], *, version: int, step: int
    ) -> list[Sample]:
        """Return samples as `generate`, some of them partial, once every quota is reached. `engine` must be a
        `PartialEngine`. Collective."""
        self._sync_weights(version)
        started = time.monotonic()
        samples = cast(PartialEngine, self.engine).generate_until(requests, quotas, seed=self.seed, step=step)
        self.seconds += time.monotonic() - started
        return samples

    def generate(self, requests: Sequence[Request], *, version: int, step: int) -> list[Sample]:
        """Return this rank's samples by the policy after `version` steps, with noise keyed by `step`. Collective.

        The first call raises UserError if the engine lost tensors in its sleep.
        """
        if self._runs:
            self._finished = self.finish(version)
        if not self._probed:
            self._probe(version, step)
        self._sync_weights(version)
        started = time.monotonic()
        samples = self.engine.generate(requests, seed=self.seed, step=step)
        self.seconds += time.monotonic() - started
        return samples

    def _probe(self, version: int, step: int) -> None:
        """Compare the engine with the actor, if the engine releases its weights in a sleep."""
        self._probed = True
        if not self.engine.sleep():
            return
        self._sync_weights(version)
        (sample,) = self.engine.generate([probe_request()], seed=self.seed, step=step)
        # The actor's pass needs the memory of the engine.
        self.sleep()
        check_probe(self.actor, sample)

    def begin(self, requests: Sequence[Request], *, version: int, step: int) -> None:
        """Start generation in the background of `engine`, a `BackgroundEngine`. Collective.

        `generate` may be called before `finish`.
        """
        self._sync_weights(version)
        cast(BackgroundEngine, self.engine).begin(requests, seed=self.seed, step=step)
        self._runs = True

    def finish(self, version: int) -> list[Sample]:
        """Wait for the samples of `begin` and return them. Collective.

        Failed requests are generated now, by the policy after `version` steps.
        """
        if self._finished is not None:
            finished, self._finished = self._finished, None
            return finished
        started = time.monotonic()
        self._runs = False
        finished = cast(BackgroundEngine, self.engine).finish(version)
        self.seconds += time.monotonic() - started
        return finished

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
