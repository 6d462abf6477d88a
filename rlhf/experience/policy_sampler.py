"""The policy as something to sample from: the engine always holds the weights of the step it is asked for."""

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
    _version: int | None = field(default=None, init=False)

    def generate(self, requests: Sequence[Request], params: SamplingParams, *, version: int, step: int) -> list[Sample]:
        """Samples of this rank's `requests` by the policy after `version` steps, noise keyed by `step`. Collective."""
        if version != self._version:
            self.engine.update_weights(self.actor.full_tensors(), version)
            self._version = version
        return self.engine.generate(requests, params, seed=self.seed, step=step)

    def forget(self) -> None:
        """Take the weights anew at the next call: after a roll-back a version that was seen before has other ones."""
        self._version = None
