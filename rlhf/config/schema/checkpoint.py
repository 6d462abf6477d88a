"""Section `checkpoint`: content of checkpoints, retention, remote copies."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting

CONTENTS = ("model", "optimizer", "extra", "hf_model")
STATE = ("model", "optimizer", "extra")
"""Parts that a run needs to continue bit for bit."""
REMOTES = {"s3": "s3fs", "gs": "gcsfs", "hdfs": "pyarrow", "file": "fsspec"}
"""Schemes of `checkpoint.remote`, each with the package that implements it."""


@dataclass
class MemoryConfig:
    freq: int = setting(0, ge=0, resume="harmless")
    """Steps between snapshots of the state in this machine's memory. After a crash, a restart continues from the newest
    snapshot. 0 takes none."""
    dir: str = setting("/dev/shm", resume="harmless")
    """Folder on a tmpfs for the snapshots."""
    replicas: int = setting(0, ge=0, resume="harmless")
    """Number of other nodes that also store each node's part of a snapshot in memory: a restart can continue from the
    snapshot if at most this many nodes are lost."""


@dataclass
class CheckpointConfig:
    contents: list[str] = setting(["model", "optimizer", "extra"], resume="harmless")
    """Parts to save: `model`, `optimizer`, `extra` (LR schedule and RNG), `hf_model` (a Hugging Face folder)."""
    hf_dtype: str | None = setting(None, choices=("float32", "bfloat16", "float16"), resume="harmless")
    """Dtype of the weights in `hf_model`; null means float32. A run that loads a bfloat16 or float16 `hf_model`
    continues from rounded weights."""
    hf_adapter: str = setting("keep", choices=("keep", "merge"), resume="harmless")
    """Content of `hf_model` with `model.lora`: `keep` saves a peft adapter folder, `merge` saves the whole model with
    the adapter merged."""
    load_contents: list[str] | None = setting(None, resume="start")
    """Parts that a run loads from `trainer.resume_from_path`; null means `contents`, or all parts of an imported
    checkpoint. From its own checkpoints, a run always loads everything."""
    async_save: bool = setting(True, resume="harmless")
    """Continue training while a copy in memory is written; false waits for each save. Does not change the run's
    numbers."""
    max_to_keep: int | None = setting(3, ge=1, resume="harmless")
    """Number of newest checkpoints to keep; null keeps all."""
    keep_every: int | None = setting(None, ge=1, resume="harmless")
    """Also keep every checkpoint whose step is a multiple of this; null keeps none."""
    keep_best: int = setting(0, ge=0, resume="harmless")
    """Also keep this many checkpoints with the best `best_metric`."""
    best_metric: str | None = setting(None, choices=("val/accuracy", "val/reward"), resume="harmless")
    """Metric that ranks evaluated checkpoints for `keep_best`; higher is better. null means accuracy, or reward if
    scores are not only 0 and 1."""
    remote: str | None = setting(None, resume="harmless")
    """Copy each checkpoint in the background to `s3://...`, `gs://...`, `hdfs://...` or `file://...`; null copies
    nothing."""
    remote_max_to_keep: int | None = setting(None, ge=1, resume="harmless")
    """Number of newest checkpoints to keep in `remote`; null keeps all."""
    journal: bool = setting(False, resume="harmless")
    """Write each finished sample of the current step to disk, so that a restart does not generate the sample again."""
    memory: MemoryConfig = setting(MemoryConfig)
    timeout_s: float = setting(3600.0, gt=0, resume="harmless")
    """Seconds to wait for other ranks during a save or load; after that the attempt fails and restarts."""
    on_save_error: str = setting("stop", choices=("stop", "continue"), resume="harmless")
    """After a failed save (disk full, permission): end the run, or log the error and train on. The save after the last
    step must succeed in both cases. The previous checkpoint stays intact."""
