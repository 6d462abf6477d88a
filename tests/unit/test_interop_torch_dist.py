"""Converts Megatron's distributed checkpoints to a model of transformers, and back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.convert import torch_file
from rlhf.convert.dcp import dcp_writer
from rlhf.convert.megatron.megatron_folder import write_megatron_folder
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from tests.support.megatron_states import as_older_metadata, reference, save_distributed, stacked
from tests.support.sources import opened, whole
from tests.support.tiny_models import causal_lm

SIZES = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}


def assert_is(model: PreTrainedModel, folder: Path, **origin: Any) -> None:
    """Check that the folder is Megatron's and has exactly the model's tensors, bit for bit."""
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    with opened(folder, **origin) as source:
        found = whole(source, 301)
        assert source.layout == "megatron"
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_written_folder_has_megatrons_tensors_and_is_read_back(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own reader finds the reference tensors in the written folder, in chunks of few rows written in slabs."""
    model = causal_lm(architecture, tmp_path / "model", **SIZES)
    monkeypatch.setattr(dcp_writer, "CHUNK_BYTES", 1500)
    monkeypatch.setattr(torch_file, "SLAB_BYTES", 400)
    with opened(tmp_path / "model") as source:
        write_megatron_folder(source, tmp_path / "new", tensor_ranks=2)
    expected = stacked(reference(model), 3)
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "new", no_dist=True)
    entries = dcp.FileSystemReader(tmp_path / "new").read_metadata().state_dict_metadata
    assert {name for name in entries if "_extra_state" not in name} == expected.keys()
    # megatron-core needs a `[None]` for each layer of each module that may have a state, or it loads no folder.
    states: dict[str, Any] = {f"decoder.layers.mlp.linear_fc2._extra_state/shard_{layer}_3": 0 for layer in range(3)}
    dcp.load(states, checkpoint_id=tmp_path / "new", no_dist=True)
    assert list(states.values()) == [[None]] * 3
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.load(tmp_path / "new" / "common.pt") == {}
    assert_is(model, tmp_path / "new")


def test_layers_and_halves_of_an_mlp_may_have_names_of_their_own(tmp_path: Path) -> None:
    """megatron-core uses such names with `non_homogeneous_layers` and `singleton_local_shards`. The optimizer is in the
    same folder, and the config is where verl puts it."""
    model = causal_lm("qwen2", tmp_path / "global_step_4" / "actor" / "huggingface", **SIZES)
    tensors = reference(model)
    for name in [name for name in tensors if name.endswith("linear_fc1.weight")]:
        tensors[f"{name}_w"], tensors[f"{name}_v"] = tensors.pop(name).chunk(2)
    tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(16)
    save_distributed(tensors, tmp_path / "global_step_4" / "actor" / "dist_ckpt")
    assert_is(model, tmp_path / "global_step_4")
    with opened(tmp_path / "global_step_4") as source:
        assert source.contents.progress.step == 4


def test_metadata_of_older_releases_is_read(tmp_path: Path) -> None:
    """megatron-core 0.13 to 0.15 writes `.metadata` in a class of its own."""
    model = causal_lm("llama", tmp_path / "model", **SIZES)
    save_distributed(stacked(reference(model), 3), tmp_path / "dist")
    as_older_metadata(tmp_path / "dist")
    assert_is(model, tmp_path / "dist", model_files=tmp_path / "model")


def lose_tensor(tensors: dict[str, Tensor]) -> None:
    del tensors["decoder.layers.mlp.linear_fc2.weight"]


def add_expert(tensors: dict[str, Tensor]) -> None:
    tensors["decoder.layers.mlp.router.weight"] = torch.ones(3, 2)


def lose_layer(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".layers." in name]:
        tensors[name] = tensors[name][:2]


def lose_model(tensors: dict[str, Tensor]) -> None:
    tensors.clear()
    tensors["optimizer.state.step"] = torch.ones(1)


def change_width(tensors: dict[str, Tensor]) -> None:
    name = "decoder.layers.self_attention.linear_qkv.weight"
    tensors[name] = tensors[name][:, :8]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_tensor, r"has no decoder.layers.0.mlp.linear_fc2.weight\. Restore"),
        (add_expert, r"has decoder.layers.0.mlp.router.weight, which transformers' llama lacks"),
        (lose_layer, r"has no decoder.layers.2.*linear_qkv.layer_norm_weight"),
        (lose_model, "lists no model tensors"),
        (change_width, r"linear_qkv.weight has the shape \[8, 16\] where \[24, 16\] is expected"),
    ],
)
def test_a_folder_of_another_model_gets_one_line(
    tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    """The line names the tensor that is missing, unknown or of another shape."""
    tensors = stacked(reference(causal_lm("llama", tmp_path / "model", **SIZES)), 3)
    spoil(tensors)
    save_distributed(tensors, tmp_path / "dist_ckpt")
    with pytest.raises((UserError, DamagedCheckpoint), match=message) as error:
        opened(tmp_path / "dist_ckpt", model_files=tmp_path / "model").__enter__()
    assert "\n" not in str(error.value)


def test_another_format_and_a_missing_config_get_one_line(tmp_path: Path) -> None:
    """The folders have Megatron's older format, or no config.json that describes the model."""
    tensors = stacked(reference(causal_lm("llama", tmp_path / "model", **SIZES)), 3)
    save_distributed(tensors, tmp_path / "a" / "zarr", backend="zarr")
    with pytest.raises(UserError, match="has Megatron's format zarr"):
        opened(tmp_path / "a" / "zarr").__enter__()
    save_distributed(tensors, tmp_path / "b" / "dist_ckpt")
    with pytest.raises(UserError, match=r"has no config.json. Set --hf_model_path"):
        opened(tmp_path / "b" / "dist_ckpt").__enter__()
