"""The policy as something to sample from: the engine always holds the weights of the step it is asked for."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.backends.base import TrainingBackend
from rlhf.rollout import Request, RolloutEngine, Sample, SamplingParams


@dataclass
class PolicySampler:
    """Generates with the actor's present weights; hands them to the engine only when they have changed."""

    engine: RolloutEngine
    actor: TrainingBackend
    seed: int
    seconds: float = field(default=0.0, init=False)
    """What generation has taken on this rank, so far, without the weights, for which ranks wait for each other."""
    sync_seconds: float = field(default=0.0, init=False)
    """What it has taken to hand over weights, since `metrics` was last called."""
    _version: int | None = field(default=None, init=False)

    def generate(self, requests: Sequence[Request], params: SamplingParams, *, version: int, step: int) -> list[Sample]:
        """Samples of this rank's `requests` by the policy after `version` steps, noise keyed by `step`. Collective."""
        started = time.monotonic()
        if version != self._version:
            self.engine.update_weights(self.actor.full_tensors, version)
            self._version = version
        self.sync_seconds += time.monotonic() - started
        started = time.monotonic()
        samples = self.engine.generate(requests, params, seed=self.seed, step=step)
        self.seconds += time.monotonic() - started
        return samples

    def rest(self) -> None:
        """Leave the device to training until the next call. Collective."""
        if self.engine.sleep():
            self._version = None

    def metrics(self) -> dict[str, float]:
        """Figures of the engine, and of this rank's handing over of weights, since the last call."""
        seconds, self.sync_seconds = self.sync_seconds, 0.0
        return {"perf/weight_sync_seconds": seconds} | self.engine.metrics()

    def forget(self) -> None:
        """Take the weights anew at the next call: after a roll-back a version that was seen before has other ones."""
        self._version = None
