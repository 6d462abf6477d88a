"""Section `model.lora`: adapters (LoRA) in the place of all weights of the policy."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting

ALL_LINEAR = "all-linear"


@dataclass
class LoraConfig:
    enabled: bool = setting(False)
    """Train adapters beside the policy's weights, which stay as they are; the reference is the model without them."""
    rank: int = setting(32, ge=1)
    """Rank of the adapters."""
    alpha: float = setting(32.0, gt=0)
    """Scale: what an adapter adds is multiplied by `alpha / rank` (`use_rslora`: by alpha over the root of rank)."""
    target_modules: Any = setting(ALL_LINEAR)
    """The layers that get one: `all-linear` (every linear layer but the head), or a list of the ends of their names,
    e.g. [q_proj, v_proj]."""
    exclude_modules: list[str] = setting([])
    """The ends of names of layers that get none."""
    dropout: float = setting(0.0, ge=0, le=0.9)
    """Share of an adapter's inputs that is left out at random in the update; never where log-probs are taken."""
    use_rslora: bool = setting(False)
    """Rank-stabilised scale (arXiv 2312.03732)."""
    use_dora: bool = setting(False)
    """A magnitude of its own for each output (DoRA, arXiv 2402.09353); slower, and not with DeepSpeed's stage 3."""
    path: str | None = setting(None, resume="start")
    """A folder of peft's (adapter_config.json, adapter_model.safetensors) with the adapters to begin with."""
    base_dtype: str | None = setting(None, choices=("float32", "bfloat16"))
    """The precision in which the frozen weights are held; null means bfloat16 with `backend.autocast=bfloat16`, else
    float32. Adapters and their moments are float32."""
