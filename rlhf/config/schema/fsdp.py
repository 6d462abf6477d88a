"""Sections `fsdp_config`, named as in verl but for any backend: dtype and offload of a model's state."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class FrozenFsdpConfig:
    """A model that is not trained."""

    model_dtype: str | None = setting(None, choices=("float32", "bfloat16"))
    """Dtype of the frozen weights. null: bfloat16 if passes compute in bfloat16 (`backend.autocast`), which changes no
    log-prob, else float32; a reference with `ref.update_freq` always has float32. bfloat16 needs half the memory; if
    passes compute in float32, bfloat16 rounds the weights of float32 files."""
    param_offload: bool = setting(False, resume="harmless")
    """On CUDA: keep the weights in host memory except during forward passes."""


@dataclass
class TrainedFsdpConfig:
    """A model in training."""

    param_offload: bool = setting(False, resume="harmless")
    """On CUDA: keep the weights in host memory except during passes of the model."""
    optimizer_offload: bool = setting(False, resume="harmless")
    """On CUDA: keep AdamW's moments (with DeepSpeed also the master weights) in host memory between optimizer steps.
    The steps run on the GPU."""
