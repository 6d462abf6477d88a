"""Runs the embedded engine in a thread, a `BackgroundEngine` without servers for generation a step ahead."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from rlhf.rollout import Request, Sample, Weights
from rlhf.rollout.embedded import EmbeddedEngine

DEADLINE_S = 60


class BackgroundThread:
    """A `BackgroundEngine` that fails if called in a way that the protocol does not allow.

    Generations of `begin` wait for `gate`. While `loses` is true, a begun generation loses every second sample, and
    `finish` generates the lost samples again.
    """

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self._pool, self.dtype = engine, ThreadPoolExecutor(1), engine.dtype
        self._running: Future[list[Sample]] | None = None
        self.gate, self.loses, self.begun = Event(), False, 0
        self.gate.set()

    @property
    def runs(self) -> bool:
        return self._running is not None and not self._running.done()

    def update_weights(self, weights: Weights, version: int) -> None:
        assert self._running is None
        self._weights = weights
        self._engine.update_weights(weights, version)

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        assert self._running is None
        return self._engine.generate(requests, seed=seed, step=step)

    def begin(self, requests: Sequence[Request], *, seed: int, step: int) -> None:
        assert self._running is None
        self._again, self._lost, self.begun = (requests, seed, step), self.loses, self.begun + 1
        self._running = self._pool.submit(self._samples, requests, seed, step)

    def finish(self, version: int) -> list[Sample]:
        assert self._running is not None
        samples, self._running = self._running.result(DEADLINE_S), None
        if not self._lost:
            return samples
        self._engine.update_weights(self._weights, version)
        anew = self._samples(*self._again)
        return [b if b.sample % 2 else a for a, b in zip(samples, anew, strict=True)]

    def sleep(self) -> bool:
        assert self._running is None
        return False

    def metrics(self) -> dict[str, float]:
        assert self._running is None
        return {}

    def close(self) -> None:
        self._pool.shutdown()

    def _samples(self, requests: Sequence[Request], seed: int, step: int) -> list[Sample]:
        assert self.gate.wait(DEADLINE_S)
        return self._engine.generate(requests, seed=seed, step=step)
