"""Section `backend`: the training engine."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class BackendConfig:
    name: str = setting("fsdp2", choices=("fsdp2", "deepspeed"), resume="harmless")
    """Training engine. Either engine loads a checkpoint exactly; later steps are bit-identical only with the same
    engine."""
    autocast: str | None = setting("none", choices=("none", "bfloat16"), by_device=True)
    """Precision of forward and backward passes; null means bfloat16 on CUDA, none (float32) on a CPU. Weights and
    optimizer state stay float32 (DeepSpeed: as master weights)."""
    reshard_after_forward: bool = setting(True, resume="harmless")
    """Free gathered weights between forward and backward: less memory, more communication."""
    dp_replicate: int | None = setting(None, ge=1, resume="harmless")
    """Replicas of each model (HSDP), each sharded over ranks / dp_replicate ranks. More replicas need more memory and
    less communication. null: as in the checkpoint; without a checkpoint, one per rank if the run is on the CPUs of one
    machine and half of its memory suffices, else 1."""
    zero_stage: int = setting(2, ge=0, le=3, resume="harmless")
    """State that DeepSpeed shards: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
    offload_optimizer: bool = setting(False, resume="harmless")
    """DeepSpeed on CUDA: keep master weights and optimizer state in CPU memory and run optimizer steps on the CPU."""
    use_liger: bool = setting(False, resume="harmless")
    """On CUDA, compute log-probs with Liger's fused linear cross-entropy (`liger-kernel`), which cannot compute the
    entropy."""

    @property
    def replicas(self) -> int:
        """Return `dp_replicate`, or 1 if it is null because the memory plan did not set it."""
        return self.dp_replicate or 1
