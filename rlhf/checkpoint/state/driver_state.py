"""Defines the driver state: a run's progress beyond its tensors, committed together with the weights."""

from dataclasses import asdict, dataclass, fields
from datetime import date
from typing import Any, get_type_hints

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import parse_json

LARGEST = (1 << 63) - 1
"""Upper limit of any counter."""


@dataclass
class DriverState:
    """Counts a run's progress. JSON-able; `run_id` and `wall_seconds` do not influence the training."""

    run_id: str
    total_steps: int
    """Upper limit of steps."""
    steps_per_epoch: float
    """Batches in a pass over the prompts. With dynamic sampling, a pass has fewer steps than batches."""
    total_epochs: int | None = None
    """Upper limit of passes over the prompts; None: no limit."""
    step: int = 0
    """Training steps done."""
    epochs: float = 0.0
    """Passes over the prompts so far, including dropped prompts."""
    tokens: int = 0
    """Prompt and response tokens trained on."""
    samples: int = 0
    """Responses trained on."""
    best_accuracy: float | None = None
    best_step: int | None = None
    wall_seconds: float = 0.0
    """Time spent in steps, over all attempts. If a step is repeated, only its last try counts."""
    started_on: str | None = None
    """Day of the run's start (ISO), which chat templates print; None for another tool's checkpoint."""

    @property
    def finished(self) -> bool:
        return self.ends_with(self.step, self.epochs)

    def ends_with(self, step: int, epochs: float) -> bool:
        """Return whether `step`, after which `epochs` passes are done, is the last step."""
        return step >= self.total_steps or (self.total_epochs is not None and epochs >= self.total_epochs)

    def finish_step(self, tokens: int, samples: int, seconds: float, epochs: float) -> None:
        """Count one step, after which `epochs` passes over the prompts are done."""
        self.step += 1
        self.epochs = epochs
        self.tokens += tokens
        self.samples += samples
        self.wall_seconds += seconds

    def note_accuracy(self, accuracy: float | None) -> None:
        if accuracy is not None and (self.best_accuracy is None or accuracy > self.best_accuracy):
            self.best_accuracy, self.best_step = accuracy, self.step

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, except run.json's values and the run's length (from the configuration)."""
        for field in fields(self):
            if field.name not in ("run_id", "started_on", "total_steps", "total_epochs", "steps_per_epoch"):
                setattr(self, field.name, state[field.name])


def parse_driver_state(content: bytes, name: str, step: int) -> dict[str, Any]:
    """Parse the driver state in the file `name` of the checkpoint of `step` (from its manifest).

    Raises:
        DamagedCheckpoint: a field has the wrong type, the step differs, or an object's state is not a JSON object.
    """
    state = parse_json(content, name)
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{name}: is not a driver state")
    state.setdefault("started_on", None)  # release 0.1.0 did not store it
    for field, kind in get_type_hints(DriverState).items():
        # JSON may have a whole number for a float.
        if field not in state or not isinstance(state[field], kind | int if isinstance(0.0, kind) else kind):
            raise DamagedCheckpoint(f"{name}: {field} is missing or has the wrong type")
        if isinstance(state[field], int) and abs(state[field]) > LARGEST:
            raise DamagedCheckpoint(f"{name}: {field} is out of range")
    if state["step"] != step:
        raise DamagedCheckpoint(f"{name}: is of step {state['step']}, but the manifest is of step {step}")
    if other := [key for key in state.keys() - get_type_hints(DriverState) if not isinstance(state[key], dict)]:
        raise DamagedCheckpoint(f"{name}: {min(other)} is not an object")
    if state["started_on"] is not None and not is_day(state["started_on"]):
        raise DamagedCheckpoint(f"{name}: started_on is not a date")
    return state


def is_day(value: Any) -> bool:
    """Return whether `value` is a date in ISO form."""
    try:
        return date.fromisoformat(value).isoformat() == value
    except (TypeError, ValueError):
        return False
