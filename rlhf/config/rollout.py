from dataclasses import dataclass

from rlhf.config.fields import setting


@dataclass
class ValKwargsConfig:
    temperature: float = setting(0.0, ge=0, resume="harmless")
    """0 is greedy."""
    top_p: float = setting(1.0, gt=0, le=1, resume="harmless")
    top_k: int = setting(-1, ge=-1, resume="harmless")
    n: int = setting(1, ge=1, resume="harmless")
    """Samples per held-out prompt; the accuracy is their mean."""


@dataclass
class RolloutConfig:
    name: str = setting("embedded", choices=("embedded",))
    """The engine that generates: `embedded` is the one in torch that comes with the trainer."""
    n: int = setting(8, ge=1)
    """Samples per prompt: the group of GRPO."""
    temperature: float = setting(1.0, ge=0)
    """0 is greedy."""
    top_p: float = setting(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = setting(-1, ge=-1)
    """Sample from the k likeliest tokens; -1 or 0 from all."""
    stop: list[str] = setting([])
    """Strings that end a sample; the tokens that complete one are kept."""
    ignore_eos: bool = setting(False)
    """Go on to `data.max_response_length` whatever the policy says (for benchmarks)."""
    max_num_seqs: int = setting(256, ge=1, resume="harmless")
    """Samples that one rank decodes together."""
    dtype: str = setting("float32", choices=("float32", "bfloat16", "float16"))
    """Precision of the engine's weights and cache."""
    val_kwargs: ValKwargsConfig = setting(ValKwargsConfig)
