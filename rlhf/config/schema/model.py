"""Section `model`: the policy and how models are loaded."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting
from rlhf.config.schema.lora import LoraConfig


@dataclass
class ModelConfig:
    path: str = setting("???", resume="harmless")
    """A local folder in Hugging Face format or a Hub name. A resume compares what the path holds, not the path."""
    revision: str | None = setting(None, resume="harmless")
    """Branch, tag or commit of a Hub name."""
    trust_remote_code: bool = setting(False)
    """Run Python code that comes with the model. Off: loading a model never executes code."""
    loading: str = setting("auto", choices=("auto", "shard", "broadcast"), resume="harmless")
    """The way of weights to the ranks, also of those of `critic.path` and `reward_model.path`. `shard`: each rank reads
    its own part, so every one must see the files; `broadcast`: one rank reads and sends them; `auto`: `shard` where
    every rank sees the same files, else `broadcast`."""
    chat_template: str | None = setting(None)
    """A Jinja file that replaces the tokenizer's chat template."""
    attn_implementation: str = setting("sdpa", choices=("sdpa", "eager", "flash_attention_2"))
    """Attention kernel."""
    enable_gradient_checkpointing: bool = setting(False, resume="harmless")
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    lora: LoraConfig = setting(LoraConfig)
