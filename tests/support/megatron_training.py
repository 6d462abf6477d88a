"""Trains with megatron-core's optimizers on CPUs, on four gloo ranks, and saves them: `megatron_training.py FOLDER`.

For each split (tensor x pipeline x virtual pipeline ranks), the folders `exp_avg`, `exp_avg_sq` and `masters` have the
state that an optimizer in bfloat16 has after three steps, saved as if it were the weights. The other folders have the
model with the optimizer: `plain` (not distributed), `ranks` (a file per rank), and one per format of the distributed
optimizer.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SPLITS = [(1, 1, 1), (2, 1, 1), (2, 2, 1)]
FORMATS = ["fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter"]
STEPS = 3


class OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU instead of the GPU, and names their types as those of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) and func is torch.Tensor.type else found


def place_of_rank() -> tuple[int, int]:
    """Return the tensor and pipeline parallel rank."""
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_rank()
    return tensor, parallel_state.get_pipeline_model_parallel_rank()


def trained(split: tuple[int, int, int], distributed: bool) -> tuple[list[Any], Any]:
    """Return this rank's modules after three steps with random gradients, and their optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron_ranks import build

    tensor, stage = place_of_rank()
    torch.manual_seed(7 + tensor + 10 * stage)
    models = [model.bfloat16() for model in build("qwen2", split)]
    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(model.config, settings, model) for model in models]
    config = OptimizerConfig(optimizer="adam", lr=0.01, bf16=True, use_distributed_optimizer=distributed, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, wrapped)
    for _ in range(STEPS):
        for parameter in itertools.chain.from_iterable(model.parameters() for model in models):
            parameter.main_grad.copy_(torch.randn(parameter.shape))
        optimizer.step()
    return models, optimizer


def save(split: tuple[int, int, int], folder: Path) -> None:
    """Write the folders of one split."""
    from megatron.core import parallel_state
    from megatron_ranks import named

    for kind in [None, *FORMATS]:
        models, optimizer = trained(split, kind is not None)
        metadata: dict[str, Any] = {"distrib_optim_sharding_type": kind} if kind else {}
        content = named(models, "sharded_state_dict")
        content["optimizer"] = optimizer.sharded_state_dict(content, metadata=metadata)
        save_one(content, folder / (kind or "plain"))
        if kind is not None:
            continue
        if parallel_state.get_data_parallel_rank() == 0:
            tensor, stage = place_of_rank()
            place = folder / "ranks" / f"mp_rank_{tensor:02d}_{stage:03d}"
            place.mkdir(parents=True)
            content = named(models, "state_dict") | {"optimizer": optimizer.state_dict(), "iteration": STEPS}
            torch.save(content, place / "model_optim_rng.pt")
        state = optimizer.chained_optimizers[0].optimizer.state
        parameters = [parameter for model in models for parameter in model.parameters()]
        masters = [parameter.main_param.detach() for parameter in parameters]
        states = {"masters": masters}
        states |= {key: [state[p.main_param][key] for p in parameters] for key in ("exp_avg", "exp_avg_sq")}
        for name, tensors in states.items():
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.data = tensor.clone()
            save_one(named(models, "sharded_state_dict"), folder / name)


def save_one(content: dict[str, Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(content, str(folder))


def rank(number: int, root: Path) -> None:
    from megatron_ranks import WORLD, parallel

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(root / "store"), WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=number, world_size=WORLD)
    with OnCpu():
        for split in SPLITS:
            with parallel(split):
                save(split, root / "x".join(map(str, split)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing
    from megatron_ranks import WORLD, redirect

    redirect()
    torch.multiprocessing.start_processes(rank, (Path(sys.argv[1]),), WORLD, start_method="fork")
