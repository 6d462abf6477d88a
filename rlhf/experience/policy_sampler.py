"""Sampler of the policy: the engine always holds the weights of the step it is asked for."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from rlhf.backends.base import TrainingBackend
from rlhf.rollout import AdapterEngine, BackgroundEngine, Request, RolloutEngine, Sample


@dataclass
class PolicySampler:
    """Generates with the actor's present weights; hands them to the engine only when they have changed."""

    engine: RolloutEngine
    actor: TrainingBackend
    seed: int
    native_adapters: bool = False
    """Whether `engine` is an `AdapterEngine`, which keeps the base and gets the adapters alone."""
    seconds: float = field(default=0.0, init=False)
    """Seconds of generation on this rank, so far, without the weights, for which ranks wait for each other."""
    sync_seconds: float = field(default=0.0, init=False)
    """Seconds of handing over weights, since `metrics` was last called."""
    _version: int | None = field(default=None, init=False)
    _runs: bool = field(default=False, init=False)
    # What `begin` started has come to, once something else had to be generated before it was asked for.
    _finished: list[Sample] | None = field(default=None, init=False)

    def generate(self, requests: Sequence[Request], *, version: int, step: int) -> list[Sample]:
        """For each of this rank's requests its sample, by the policy after `version` steps. Collective.

        Noise is keyed by `step`.
        """
        if self._runs:
            self._finished = self.finish(version)
        self._hand_over(version)
        started = time.monotonic()
        samples = self.engine.generate(requests, seed=self.seed, step=step)
        self.seconds += time.monotonic() - started
        return samples

    def begin(self, requests: Sequence[Request], *, version: int, step: int) -> None:
        """Start what `generate` does, and return; `engine` is a `BackgroundEngine`. Collective.

        Other samples may be asked for before `finish`.
        """
        self._hand_over(version)
        cast(BackgroundEngine, self.engine).begin(requests, seed=self.seed, step=step)
        self._runs = True

    def finish(self, version: int) -> list[Sample]:
        """The sample of each request of `begin`. Collective.

        What failed is generated now, by the policy after `version` steps.
        """
        if self._finished is not None:
            finished, self._finished = self._finished, None
            return finished
        started = time.monotonic()
        self._runs = False
        finished = cast(BackgroundEngine, self.engine).finish(version)
        self.seconds += time.monotonic() - started
        return finished

    def _hand_over(self, version: int) -> None:
        started = time.monotonic()
        if version != self._version:
            # Cast before they are gathered: a bfloat16 engine makes that half the bytes.
            actor, dtype = self.actor, self.engine.dtype
            if self.native_adapters:
                engine = cast(AdapterEngine, self.engine)
                engine.update_adapters(actor.base_tensors, partial(actor.adapter_tensors, dtype), version)
            else:
                self.engine.update_weights(partial(actor.full_tensors, dtype), version)
            self._version = version
        self.sync_seconds += time.monotonic() - started

    def rest(self) -> None:
        """Leave the device to training until the next call. Collective."""
        if self.engine.sleep():
            self._version = None

    def metrics(self) -> dict[str, float]:
        """Figures of the engine, and of this rank's handing over of weights, since the last call."""
        seconds, self.sync_seconds = self.sync_seconds, 0.0
        return {"timing_s/update_weights": seconds} | self.engine.metrics()

    def forget(self) -> None:
        """Take the weights anew at the next call: after a roll-back a version that was seen before has other ones."""
        self._version = None
