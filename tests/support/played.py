"""Plays episodes with the embedded engine, compares their bits, and stops them as a kill would."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf import events
from rlhf.experience.episode import Episode
from rlhf.experience.journal import Journal
from rlhf.models import tiny
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Request, Sample
from rlhf.rollout.embedded import EmbeddedEngine
from rlhf.rollout.engine import Listener


class Crash(BaseException):
    """Ends a play like a kill: the trainer loses everything in memory."""


@contextmanager
def crash_at(event: str, nth: int) -> Iterator[None]:
    """Raise Crash at the `nth` announcement of `event`."""
    count = 0

    def listener(announced: str) -> None:
        nonlocal count
        count += announced == event
        if announced == event and count == nth:
            raise Crash

    events._listeners.append(listener)
    try:
        yield
    finally:
        events._listeners.remove(listener)


class Sampler:
    """The embedded engine with the tiny policy; counts the requests of each call. `listens`: give turns early."""

    listens = False
    background = False

    def __init__(self, rows: int = 64) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(tiny.FOLDER)
        model = AutoModelForCausalLM.from_pretrained(tiny.FOLDER, dtype=torch.float32)
        self.engine, self.sizes = EmbeddedEngine(model, self.tokenizer, rows), list[int]()

    def generate(
        self, requests: list[Request], *, version: int, step: int, listener: Listener | None = None
    ) -> list[Sample]:
        self.sizes.append(len(requests))
        self.engine.listen(listener if self.listens else None)
        return self.engine.generate(requests, seed=3, step=step)


def facts(groups: list[list[Episode]]) -> list[Any]:
    """Return everything that an update uses, as bits."""
    return [(e.prompt_ids, s.token_ids.tobytes(), s.log_probs.tobytes(), s.observations, s.forks, s.finish_reason,
             mask_facts(s), e.rewards)
            for group in groups for e in group for s in [e.finished(0)]]  # fmt: skip


def mask_facts(sample: Sample) -> Any:
    mask = sample.sampling_mask
    return None if mask is None else (mask.counts.tobytes(), mask.token_ids.tobytes())


def journal_at(folder: Path) -> Journal:
    return Journal(folder, "trajectory", "scored", Coordinator(GlooTransport()))
