"""Folders that two ranks save with torch.distributed.checkpoint, by rows and by columns, and a folder that we write and
the ranks load."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from rlhf.convert.dcp.dcp_folder import write_dcp_folder
from rlhf.convert.layouts import open_source
from rlhf.models.hf.source import Origin
from tests.support.checkpoints import run_ranks
from tests.support.tiny_models import tiny_config

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.mark.slow
def test_what_two_ranks_save_and_load(tmp_path):
    expected, loaded = run_ranks(2, work, str(tmp_path), deadline_s=120, join=tmp_path / "join")[0]
    assert everything(tmp_path / "rows") == expected
    weights = {name: tensor for name, tensor in expected.items() if name.endswith("weight")}
    assert len(weights) == 21
    assert everything(tmp_path / "columns") == weights
    assert everything(tmp_path / "safetensors") == weights
    assert loaded == expected


def work(rank: int, folder: str) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = sharded_model(seed=1)
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({**weights, "optimizer": state}, checkpoint_id=f"{folder}/rows")
    expected = held(weights, state)
    columns = {
        name: distribute_tensor(torch.tensor(values).view(shape), mesh, [Shard(len(shape) - 1)])
        for name, (shape, values) in expected.items()
        if name.endswith("weight")
    }
    dcp.save(columns, checkpoint_id=f"{folder}/columns")
    dcp.save(columns, storage_writer=HuggingFaceStorageWriter(f"{folder}/safetensors", save_distributed=True))
    if rank == 0:
        Path(folder, "written").mkdir()
        write_dcp_folder(open_source(Origin(Path(folder, "rows"))), Path(folder, "written"))
    dist.barrier()
    return expected, load(f"{folder}/written")


def load(folder: str) -> dict[str, Any]:
    """Load a folder into another sharded model and optimizer, and return their state."""
    model, optimizer = sharded_model(seed=2)
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    # The program sets the optimizer's hyperparameters, so load only its state.
    state_dict = {**weights, "optimizer": {key: value for key, value in state.items() if key.startswith("state.")}}
    dcp.load(state_dict, checkpoint_id=folder)
    rest = {key: value for key, value in state.items() if not key.startswith("state.")}
    loaded = {key: state_dict[key] for key in weights}
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded,
        optim_state_dict=state_dict["optimizer"] | rest,
        options=FLAT,
    )
    return held(*get_state_dict(model, optimizer, options=FLAT))


def sharded_model(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a tiny Llama whose rows are sharded over two ranks, and AdamW."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config("llama")).float()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def held(weights: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return shape and values of every unsharded tensor. Collective."""
    moments = {key.removeprefix("state."): value for key, value in state.items() if key.startswith("state.")}
    return {name: plain(tensor) for name, tensor in (weights | moments).items()}


def plain(tensor: Tensor) -> tuple[tuple[int, ...], list[float]]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tuple(whole.shape), whole.reshape(-1).tolist()


def everything(folder: Path) -> dict[str, Any]:
    source = open_source(Origin(folder))
    assert source.layout == "dcp"
    infos = source.contents.tensors | source.contents.moments
    return {name: (info.shape, source.read(name, 0, info.numel).tolist()) for name, info in infos.items()}
