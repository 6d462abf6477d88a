"""Driver state: where the run stands, beyond its tensors. It is part of the same commit as the weights."""

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class DriverState:
    """Everything of the run's course that is no tensor.

    JSON-able; `run_id` and `wall_seconds` do not influence the numbers.
    """

    run_id: str
    total_steps: int
    steps_per_epoch: float
    step: int = 0
    """Training steps done."""
    tokens: int = 0
    """Prompt and response tokens trained on."""
    samples: int = 0
    """Responses trained on."""
    best_accuracy: float | None = None
    best_step: int | None = None
    wall_seconds: float = 0.0
    """Time spent in steps, over all attempts that counted."""

    def finish_step(self, tokens: int, samples: int, seconds: float) -> None:
        """Count one step done."""
        self.step += 1
        self.tokens += tokens
        self.samples += samples
        self.wall_seconds += seconds

    def note_accuracy(self, accuracy: float | None) -> None:
        """Remember the best held-out accuracy and the step it was seen at."""
        if accuracy is not None and (self.best_accuracy is None or accuracy > self.best_accuracy):
            self.best_accuracy, self.best_step = accuracy, self.step

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; the run's identity and length are the run directory's and the configuration's
        word."""
        for field in fields(self):
            if field.name not in ("run_id", "total_steps", "steps_per_epoch"):
                setattr(self, field.name, state[field.name])
