"""Section `backend`: the training engine."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class BackendConfig:
    name: str = setting("fsdp2", choices=("fsdp2", "deepspeed"), resume="harmless")
    """The training engine. State is exact after a change of it; bits of the following steps are equal at an equal one
    only."""
    autocast: str | None = setting("none", choices=("none", "bfloat16"), by_device=True)
    """Precision of the forward and backward pass; null means bfloat16 on CUDA, none (float32) on a CPU. Weights and
    optimizer stay float32 (DeepSpeed: master weights beside the module's)."""
    reshard_after_forward: bool = setting(True, resume="harmless")
    """Free gathered weights between forward and backward: less memory, more communication."""
    dp_replicate: int = setting(1, ge=1, resume="harmless")
    """FSDP2: replicas of each model, each sharded over as many ranks (HSDP). Weights are gathered within a replica and
    gradients summed over all: more memory, less traffic between machines."""
    zero_stage: int = setting(2, ge=0, le=3, resume="harmless")
    """The state that DeepSpeed spreads over the ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = setting(False, resume="harmless")
    """DeepSpeed on CUDA: keep master weights and optimizer state in the CPU's memory and step there."""
    use_liger: bool = setting(False, resume="harmless")
    """On CUDA: log-probs by Liger's fused linear cross-entropy (`liger-kernel`), which knows no entropy, instead of our
    own chunks."""
