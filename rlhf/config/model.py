from dataclasses import dataclass

from rlhf.config.fields import setting


@dataclass
class ModelConfig:
    path: str = setting("???", resume="harmless")
    """A local folder in Hugging Face format or a Hub name. A resume compares what the path holds, not the path."""
    revision: str | None = setting(None, resume="harmless")
    """Branch, tag or commit of a Hub name."""
    trust_remote_code: bool = setting(False)
    """Run Python code that comes with the model. Off: loading a model never executes code."""
    chat_template: str | None = setting(None)
    """A Jinja file that replaces the tokenizer's chat template."""
    attn_implementation: str = setting("sdpa", choices=("sdpa", "eager", "flash_attention_2"))
    """Attention kernel."""
    enable_gradient_checkpointing: bool = setting(False, resume="harmless")
    """Recompute activations in the backward pass: less memory, about a third more compute."""
