"""Section `model.lora`: LoRA adapters that train instead of all weights of the policy."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting

ALL_LINEAR = "all-linear"


@dataclass
class LoraConfig:
    enabled: bool = setting(False)
    """Train LoRA adapters and freeze the policy's weights. The reference is the model without adapters."""
    rank: int = setting(32, ge=1)
    """Rank of the adapters."""
    alpha: float = setting(32.0, gt=0)
    """Scale: an adapter's output is multiplied by `alpha / rank` (`use_rslora`: alpha / sqrt(rank))."""
    target_modules: Any = setting(ALL_LINEAR)
    """Layers with adapters: `all-linear` (every linear layer but the head), or a list of name endings, e.g. [q_proj,
    v_proj]."""
    exclude_modules: list[str] = setting([])
    """Name endings of layers without adapters."""
    dropout: float = setting(0.0, ge=0, le=0.9)
    """Dropout on adapter inputs during the update, not when log-probs are computed."""
    use_rslora: bool = setting(False)
    """Rank-stabilized scale (arXiv 2312.03732)."""
    use_dora: bool = setting(False)
    """DoRA's trained magnitude per output (arXiv 2402.09353). Slower; not with `backend.zero_stage=3`."""
    path: str | None = setting(None, resume="start")
    """peft folder (adapter_config.json, adapter_model.safetensors) with the initial adapters; null starts new
    adapters."""
    base_dtype: str | None = setting(None, choices=("float32", "bfloat16"))
    """Dtype of the frozen weights; null means bfloat16 with `backend.autocast=bfloat16`, else float32. Adapters and
    their optimizer state are float32."""
