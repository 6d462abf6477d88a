"""Sections `fsdp_config`, named as in verl and good for any backend: how a model lies in memory."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class FrozenFsdpConfig:
    """A model that is not trained."""

    model_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    """Precision in which its weights are kept; its passes compute in that of `backend.autocast`. bfloat16 takes half
    the memory and rounds the weights of float32 files, which bfloat16 files are not."""
    param_offload: bool = setting(False, resume="harmless")
    """On CUDA: keep the weights in the host's memory except in passes of the model."""


@dataclass
class TrainedFsdpConfig:
    """A model in training."""

    param_offload: bool = setting(False, resume="harmless")
    """On CUDA: keep the weights in the host's memory except in passes of the model."""
    optimizer_offload: bool = setting(False, resume="harmless")
    """On CUDA: keep AdamW's moments (with DeepSpeed the master weights, too) in the host's memory except in optimizer
    steps, which are made on the device."""
