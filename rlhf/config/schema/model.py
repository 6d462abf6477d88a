"""Section `model`: the policy and how models are loaded."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting
from rlhf.config.schema.lora import LoraConfig


@dataclass
class ModelConfig:
    path: str = setting("???", resume="harmless")
    """Local folder in Hugging Face format, or a Hub name. A resume compares the content, not the path."""
    revision: str | None = setting(None, resume="harmless")
    """Branch, tag or commit of a Hub name."""
    trust_remote_code: bool = setting(False)
    """Run Python code that comes with the model. false never executes code from a model."""
    loading: str = setting("auto", choices=("auto", "shard", "broadcast"), resume="harmless")
    """How ranks load all models: `shard` (each rank reads its part from files that all ranks can see), or `broadcast`
    (one rank reads the files and sends the weights). `auto` shards if all ranks see the same files."""
    chat_template: str | None = setting(None)
    """Jinja file that replaces the tokenizer's chat template."""
    attn_implementation: str = setting("sdpa", choices=("sdpa", "eager", "flash_attention_2"))
    """Attention kernel. `sdpa` means `eager` for architectures without sdpa, such as Gemma 2; `flash_attention_2` needs
    a GPU and the package flash-attn."""
    enable_gradient_checkpointing: bool = setting(False, resume="harmless")
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    lora: LoraConfig = setting(LoraConfig)
