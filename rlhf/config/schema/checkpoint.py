"""Section `checkpoint`: what a checkpoint holds, how many are kept, copies elsewhere."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting

CONTENTS = ("model", "optimizer", "extra", "hf_model")
REMOTES = {"s3": "s3fs", "gs": "gcsfs", "hdfs": "pyarrow", "file": "fsspec"}
"""Schemes of `checkpoint.remote`, each with the package that speaks it."""


@dataclass
class CheckpointConfig:
    contents: list[str] = setting(["model", "optimizer", "extra"], resume="harmless")
    """Parts that a save writes: any of `model`, `optimizer`, `extra` (LR schedule and RNG), `hf_model` (a Hugging Face
    folder)."""
    hf_dtype: str | None = setting(None, choices=("float32", "bfloat16", "float16"), resume="harmless")
    """Type of the weights in `hf_model`; null keeps that of the training, float32, from which alone a run can go on."""
    hf_adapter: str = setting("keep", choices=("keep", "merge"), resume="harmless")
    """Form of `hf_model` where adapters are trained (`model.lora`): `keep` writes a folder of peft's, `merge` the whole
    model, base and adapter in one."""
    load_contents: list[str] | None = setting(None, resume="start")
    """Parts that a run which begins at `trainer.resume_from_path` reads there; null means `contents`, or all that is
    there of one that was imported from another tool. From checkpoints of its own a run takes all that they hold."""
    async_save: bool = setting(True, resume="harmless")
    """Train on while a checkpoint is written, from a copy in memory; false waits for each save. The numbers of the run
    are the same."""
    max_to_keep: int | None = setting(3, ge=1, resume="harmless")
    """Newest checkpoints to keep; null keeps all."""
    keep_every: int | None = setting(None, ge=1, resume="harmless")
    """Keep checkpoints whose step is a multiple of this for good, beside the newest; null keeps none."""
    keep_best: int = setting(0, ge=0, resume="harmless")
    """Keep the best so many checkpoints by `best_metric`, beside the newest."""
    best_metric: str | None = setting(None, choices=("val/accuracy", "val/reward"), resume="harmless")
    """The figure that `keep_best` ranks by; higher is better. Only checkpoints of steps that were evaluated have it.
    null takes the headline of the evaluations: the reward where scores are not 0 or 1, else the accuracy."""
    remote: str | None = setting(None, resume="harmless")
    """Copy each checkpoint there behind the training: `s3://...`, `gs://...`, `hdfs://...` or `file://...`; null copies
    nothing."""
    remote_max_to_keep: int | None = setting(None, ge=1, resume="harmless")
    """Newest checkpoints to keep there; null keeps all."""
    journal: bool = setting(False, resume="harmless")
    """Write finished samples of the step under way to disk, so that a crash does not generate them again."""
    timeout_s: float = setting(3600.0, gt=0, resume="harmless")
    """Longest wait for another rank's part of a save or a load, in seconds; then the attempt fails and restarts."""
    on_save_error: str = setting("stop", choices=("stop", "continue"), resume="harmless")
    """A save that failed (disk full, permission): end the run, or say so and train on. The last save of a run, or of
    one that is asked to stop, always ends it with an error. The previous checkpoint stays intact either way."""
