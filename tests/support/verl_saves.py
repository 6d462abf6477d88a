"""Saves checkpoints with verl's manager and merges them with verl's merger, in the environment that has verl.

    python verl_saves.py MODELS TARGET CASE...

A case is `MODEL/STRATEGY/RANKS_OF_A_REPLICA`, plus `/lora` for an adapter. Two gloo ranks train the model in
`MODELS/MODEL` for two steps and save in `TARGET/CASE/global_step_2/actor`. `TARGET/CASE/merged` is the output of verl's
merger. `truth.pt` has the whole `tensors`, the `moments` by parameter, and for an adapter peft's `merged` weights.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.simplefilter("ignore")
from omegaconf import OmegaConf  # noqa: E402
from peft import LoraConfig, TaskType, get_peft_model  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from verl.model_merger.__main__ import main as merger  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy  # noqa: E402
from verl.workers.engine.fsdp.utils import get_sharding_strategy  # noqa: E402

RANKS = 2


def in_rank(rank: int, models: str, target: str, cases: list[str]) -> None:
    """Run all cases, one after the other."""
    store = dist.FileStore(f"{target}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for case in cases:
        name, strategy, size, *lora = case.split("/")
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_pretrained(f"{models}/{name}", dtype=torch.float32)
        if lora:
            model.enable_input_require_grads()
            config = LoraConfig(
                task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, target_modules="all-linear", bias="none"
            )
            model = get_peft_model(model, config)
        wrapped = wrap(model, strategy, int(size), bool(lora))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        for step in range(2):
            torch.manual_seed(step)
            tokens = torch.randint(0, 500, (2, 8))
            wrapped(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        contents = OmegaConf.create({"save_contents": ["model", "optimizer", "extra"], "load_contents": ["model"]})
        tokenizer = AutoTokenizer.from_pretrained(f"{models}/{name}")
        manager = FSDPCheckpointManager(wrapped, optimizer, schedule, tokenizer, contents)
        manager.save_checkpoint(f"{target}/{case}/global_step_2/actor", global_step=2)
        truth = truth_of(wrapped, optimizer)
        if rank == 0:
            if lora:
                truth = {"merged": merged_by_peft(f"{models}/{name}", model, truth["tensors"])}
            torch.save(truth, f"{target}/{case}/truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def wrap(model: Any, strategy: str, size: int, lora: bool) -> Any:
    """Wrap the model like verl's engine, on CPUs."""
    if size == RANKS:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    else:
        mesh = init_device_mesh("cpu", (RANKS // size, size), mesh_dim_names=("ddp", "fsdp"))
    if strategy == "fsdp2":
        apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, OmegaConf.create({"wrap_policy": {}}))
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(module=model, config=None, is_lora=lora),
        sharding_strategy=get_sharding_strategy(mesh),
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=lora,
    )


def truth_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Gather the model's tensors and all existing moments. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return {"tensors": tensors, "moments": FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]}
    tensors = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    states = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    return {
        "tensors": tensors,
        "moments": {name: {key: whole(value) for key, value in state.items()} for name, state in states.items()},
    }


def whole(tensor: Any) -> torch.Tensor:
    """Gather a DTensor."""
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def merged_by_peft(base: str, model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict of the base merged with the adapter."""
    fresh: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), model.peft_config["default"]
    )
    fresh.load_state_dict(tensors)
    return dict(fresh.merge_and_unload().state_dict())


if __name__ == "__main__":
    models, target, *cases = sys.argv[1:]
    for case in cases:
        Path(target, case).mkdir(parents=True)
    mp.start_processes(in_rank, (models, target, cases), nprocs=RANKS, start_method="fork")
    for case in cases:
        saved = f"{target}/{case}/global_step_2/actor"
        sys.argv = ["", "merge", "--backend", "fsdp", "--local_dir", saved, "--target_dir", f"{target}/{case}/merged"]
        merger()
    os._exit(0)  # verl's imports leave threads running
