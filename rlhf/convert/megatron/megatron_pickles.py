"""Lists the classes that Megatron's files may use beside tensors and plain containers."""

from rlhf.convert.pickles import stand_in

UNREAD = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "signal.Signals",
    "pathlib.PosixPath",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    "torch.optim.adam.Adam",
    "torch.optim.adamw.AdamW",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
)
"""Classes that Megatron-LM saves beside tensors (arguments, random states); a StandIn replaces each object."""
ALLOWED = [stand_in(name) for name in UNREAD]
