"""Environments that append a line to the file in RLHF_TEST_CALLS, if set, for each call, to count the calls."""

import os
import random
import uuid
from pathlib import Path

from rlhf.environments import free_text

CALLS = "RLHF_TEST_CALLS"


def log_call(text: str) -> None:
    if CALLS in os.environ:
        with Path(os.environ[CALLS]).open("a") as file:
            file.write(f"{text}\n")


class Sums:
    """Reads an answer to a sum in free text, three times. Its attributes are plain values, so they are its state."""

    def reset(self, seed: int, ground_truth: str = "", **row: object) -> None:
        self.name, self.steps, self.answer, self.found = uuid.uuid4().hex, 0, ground_truth, 0.0
        self.random = random.Random(seed)
        log_call(f"{self.name} reset")

    @free_text
    def step(self, text: str) -> str | None:
        self.steps += 1
        log_call(f"{self.name} step {self.steps}")
        self.found += text.strip() == self.answer
        return f"again {self.random.randrange(10)}" if self.steps < 3 else None

    async def get_reward(self) -> float:
        log_call(f"{self.name} reward")
        return self.found + self.random.random() / 8


class StatefulSums(Sums):
    """Has attributes that are no plain values, and a `state_dict`."""

    def __init__(self) -> None:
        self.lock = Path(os.devnull).open()  # noqa: SIM115

    def close(self) -> None:
        self.lock.close()

    def state_dict(self) -> dict:
        version, internal, gauss = self.random.getstate()
        own = {"name": self.name, "steps": self.steps, "answer": self.answer, "found": self.found}
        return own | {"random": [version, list(internal), gauss]}

    def load_state_dict(self, state: dict) -> None:
        version, internal, gauss = state.pop("random")
        self.random = random.Random()
        self.random.setstate((version, tuple(internal), gauss))
        vars(self).update(state)


class UnsavedSums(StatefulSums):
    """Has no state that can be saved, but answers the same when its calls are repeated."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class ForgetfulSums(UnsavedSums):
    """Has no state that can be saved, and answers differently each time."""

    def step(self, text: str) -> str | None:  # type: ignore[override]
        answer = super().step(text)
        return None if answer is None else uuid.uuid4().hex[:4]

    step = free_text(step)
