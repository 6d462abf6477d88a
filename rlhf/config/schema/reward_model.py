"""Section `reward_model`: the sequence classifier among the rewards."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting
from rlhf.config.schema.fsdp import FrozenFsdpConfig


@dataclass
class RewardModelConfig:
    """The sequence classifier behind `reward_model` in `reward.functions`."""

    path: str | None = setting(None, resume="harmless")
    """A local folder in Hugging Face format or a Hub name, with one label and a tokenizer of its own. A resume compares
    what it holds."""
    revision: str | None = setting(None, resume="harmless")
    """Branch, tag or commit of a Hub name."""
    forward_max_token_len_per_gpu: int = setting(16384, ge=1, resume="harmless")
    """Tokens per forward pass on one rank; a longer chat goes alone."""
    use_remove_padding: bool | None = setting(None, resume="harmless")
    """Chats in one row without padding, as the actor's sequences."""
    max_length: int = setting(4096, ge=1)
    """Tokens of prompt and response that it reads; of longer texts the end."""
    fsdp_config: FrozenFsdpConfig = setting(FrozenFsdpConfig)
