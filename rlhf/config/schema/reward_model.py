"""Section `reward_model`: the sequence classifier that scores responses."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting
from rlhf.config.schema.fsdp import FrozenFsdpConfig


@dataclass
class RewardModelConfig:
    """The sequence classifier behind `reward_model` in `reward.functions`."""

    path: str | None = setting(None, resume="harmless")
    """Local folder in Hugging Face format or Hub name, with one label and its own tokenizer. A resume compares the
    content, not the path."""
    revision: str | None = setting(None, resume="harmless")
    """Branch, tag or commit of a Hub name."""
    forward_max_token_len_per_gpu: int = setting(16384, ge=1, resume="harmless")
    """Tokens per forward pass on one rank; a longer chat gets a pass of its own."""
    use_remove_padding: bool | None = setting(None, resume="harmless")
    """Pack chats without padding, as `actor.use_remove_padding`."""
    max_length: int = setting(4096, ge=1)
    """Longest chat in tokens, prompt and response; longer chats lose their beginning."""
    fsdp_config: FrozenFsdpConfig = setting(FrozenFsdpConfig)
