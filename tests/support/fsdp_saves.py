"""Saves checkpoints in verl's layout with torch's FSDP1 and FSDP2, with the gathered state in `truth.pt` beside them.

`truth.pt` has `tensors` (the state dict) and `moments` by parameter (`exp_avg`, `exp_avg_sq`, `step`).
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_models import tiny_tokenizer

STEPS, RATE = 2, 1e-2
WITH_BUFFERS = ("llama/fsdp1_orig_params", "llama/fsdp2_by_columns", "qwen2/fsdp1/2")


def save_all(rank: int, models: Path, target: Path, cases: tuple[str, ...], buffers: bool = True) -> None:
    """Train models for two steps and save them. Collective.

    A case is `MODEL/KIND` or `MODEL/KIND/REPLICAS`, with the model in `models/MODEL`, and is saved in `target/CASE`.
    With `buffers` some models have extra buffers, which transformers' models lack.
    """
    for case in cases:
        architecture, kind, *more = case.split("/")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(models / architecture, dtype=torch.float32)
        if buffers and case in WITH_BUFFERS:
            model.register_buffer("calibration", torch.arange(5.0))
            model.register_buffer("count", torch.tensor(7))
        wrapped = _wrap(model, kind, int(more[0]) if more else 1)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        for step in range(STEPS):
            torch.manual_seed(step)
            tokens = torch.randint(0, 500, (1, 8))
            wrapped(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        _save(rank, wrapped, optimizer, schedule, target / case)
        _save_truth(rank, wrapped, optimizer, target / case)


def _wrap(model: PreTrainedModel, kind: str, replicas: int) -> nn.Module:
    size = dist.get_world_size()
    if replicas == 1:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    else:
        mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("ddp", "fsdp"))
    layers = model.model.layers
    if kind.startswith("fsdp1"):
        strategy = ShardingStrategy.FULL_SHARD if replicas == 1 else ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            model,
            device_mesh=None if kind == "fsdp1_sharded_tensors" else mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
            use_orig_params=kind == "fsdp1_orig_params",
            device_id=torch.device("cpu"),
        )

    def by_columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % mesh.size(-1) == 0 else None

    for module in (*layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=by_columns if kind == "fsdp2_by_columns" else None)
    return model


def _save(rank: int, model: nn.Module, optimizer: Any, schedule: Any, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    end = f"world_size_{dist.get_world_size()}_rank_{rank}.pt"
    one = isinstance(model, FullyShardedDataParallel)
    if one:
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    torch.save(model.state_dict(), target / f"model_{end}")
    torch.save(optimizer.state_dict(), target / f"optim_{end}")
    extra = {"lr_scheduler": schedule.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, target / f"extra_state_{end}")
    if rank == 0:
        (target / "fsdp_config.json").write_text(
            json.dumps({"FSDP_version": 1 if one else 2, "world_size": dist.get_world_size()})
        )
        inner = model.module if one else model
        inner.config.save_pretrained(target / "huggingface")
        tiny_tokenizer().save_pretrained(target / "huggingface")


def _save_truth(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, target: Path) -> None:
    if isinstance(model, FullyShardedDataParallel):
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    else:
        options = StateDictOptions(full_state_dict=True)
        tensors, state = get_state_dict(model, optimizer, options=options)
        moments = state["state"]
    if rank == 0:
        torch.save({"tensors": tensors, "moments": moments}, target / "truth.pt")


def truth_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the whole tensors and the moments by parameter of a checkpoint by `save_all`."""
    truth = torch.load(folder / "truth.pt", weights_only=True)
    return truth["tensors"], truth["moments"]
