"""Sections `ref.fsdp_config` and `reward_model.fsdp_config`: how a model that is not trained lies in memory."""

from dataclasses import dataclass

from rlhf.config.fields import setting


@dataclass
class FrozenFsdpConfig:
    """A model that is not trained, with either backend."""

    model_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    """Precision in which its weights are kept; its passes compute in that of `backend.autocast`. bfloat16 takes half
    the memory and rounds the weights of float32 files, which bfloat16 files are not."""
