from dataclasses import dataclass

from rlhf.config.fields import setting

CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class CheckpointConfig:
    contents: list[str] = setting(["model", "optimizer", "extra"], resume="harmless")
    """What a save writes: any of `model`, `optimizer`, `extra` (LR schedule and RNG), `hf_model` (a Hugging Face folder)."""
    load_contents: list[str] | None = setting(None, resume="harmless")
    """What a resume reads; null means `contents`."""
    max_to_keep: int | None = setting(3, ge=1, resume="harmless")
    """Newest checkpoints to keep; null keeps all."""
    timeout_s: float = setting(3600.0, gt=0, resume="harmless")
    """Longest wait for another rank's part of a save or a load, in seconds; then the attempt fails and restarts."""
    on_save_error: str = setting("stop", choices=("stop", "continue"), resume="harmless")
    """A save that failed (disk full, permission): end the run, or say so and train on. The previous checkpoint stays intact either way."""
