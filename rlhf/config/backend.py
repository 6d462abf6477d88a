from dataclasses import dataclass

from rlhf.config.fields import setting


@dataclass
class BackendConfig:
    name: str = setting("fsdp2", choices=("fsdp2",))
    """The training engine."""
    autocast: str = setting("none", choices=("none", "bfloat16"))
    """Precision of the forward and backward pass; weights and optimizer stay float32."""
    reshard_after_forward: bool = setting(True, resume="harmless")
    """Free gathered weights between forward and backward: less memory, more communication."""
