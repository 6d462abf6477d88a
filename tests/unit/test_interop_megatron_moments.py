"""Reads AdamW's moments and float32 weights from Megatron's folders, and leaves out a state that does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.checkpoint.__main__ import main
from tests.support.megatron_states import (
    TrainedModel,
    as_older_metadata,
    reference,
    save_distributed,
    save_ranks_of,
    stacked,
)
from tests.support.sources import opened, whole
from tests.support.tiny_models import causal_lm

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
STATE = "optimizer.state."
FC2 = "decoder.layers.mlp.linear_fc2.weight"
GROUPS = [{"wd_mult": 1.0, "step": 3}, {"wd_mult": 0.0, "step": 3}]
COMMON = {
    "plain": {"state": {"common_step": torch.tensor(3.0)}, "param_groups": [{"wd_mult": 1.0}]},
    "fp32_param": {"optimizer": {"state": {"common_step": torch.tensor(3.0)}, "param_groups": [{}]}},
    "param": {"optimizer": {"param_groups": GROUPS}, "param_state_sharding_type": "fully_reshardable"},
}
"""The optimizer's part of common.pt, by the name of the float32 weights (`plain`: the model is in float32)."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[TrainedModel, Path]]:
    """A trained model of an architecture and dtype, and the folder of its config, made once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, tuple[TrainedModel, Path]] = {}

    def get(architecture: str, dtype: torch.dtype = torch.bfloat16) -> tuple[TrainedModel, Path]:
        name = f"{architecture}_{dtype}"
        if name not in made:
            made[name] = TrainedModel(causal_lm(architecture, root / name, **SIZES), dtype), root / name
        return made[name]

    return get


def distributed(trained: TrainedModel, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a `torch_dist` folder; `kind` is the name of the float32 weights, or `plain`."""
    tensors = stacked(reference(trained.weights), 4)
    states = {"exp_avg": trained.exp_avg, "exp_avg_sq": trained.exp_avg_sq}
    for name, state in (states if kind == "plain" else states | {kind: trained.masters}).items():
        tensors |= {f"{STATE}{name}.{key}": tensor for key, tensor in stacked(reference(state), 4).items()}
    return tensors


def save_common(folder: Path, optimizer: Any) -> None:
    torch.save({"optimizer": optimizer, "iteration": 3, "checkpoint_version": 3.0}, folder / "common.pt")


def assert_has_moments(folder: Path, trained: TrainedModel, files: Path) -> None:
    """Check all weights, moments and step counts bit for bit, read in odd ranges."""
    with opened(folder, model_files=files) as source:
        assert source.contents.absent == ["the learning rate schedule"]
        assert source.contents.progress.optimizer_steps == 3
        found = whole(source, 301)
    expected = trained.expected | trained.expected_moments
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


def assert_left_out(folder: Path, trained: TrainedModel, files: Path, *reasons: str) -> None:
    """Check that only the weights are read, as stored, and that the reason is one line."""
    with opened(folder, model_files=files) as source:
        line = source.contents.absent[0]
        found = whole(source)
        assert source.contents.moments == {}
    assert line.startswith("the optimizer's moments: ")
    assert "\n" not in line
    assert all(reason in line for reason in reasons), line
    weights = trained.weights.state_dict()
    assert found.keys() == trained.expected.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", COMMON)
def test_distributed_folders_give_moments_and_float32_weights(
    models: Any, tmp_path: Path, architecture: str, kind: str
) -> None:
    trained, files = models(architecture, torch.float32 if kind == "plain" else torch.bfloat16)
    save_distributed(distributed(trained, kind), tmp_path / "dist")
    save_common(tmp_path / "dist", COMMON[kind])
    assert_has_moments(tmp_path / "dist", trained, files)


def flattened(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor in the shape in which megatron-core 0.15 stores the blocks of two tensor parallel ranks."""
    layers = (len(tensor),) if ".layers." in name else ()
    counts = (1,) if tensor.dim() - len(layers) == 1 else (2, 1)
    if "linear_proj" in name or "linear_fc2" in name:
        counts = (1, 2)
    if "linear_fc1.weight" in name:  # the halves of gate, then the halves of up
        counts = (4, 1)
    counts = (*layers, *counts)
    split = [part for size, count in zip(tensor.shape, counts, strict=True) for part in (count, size // count)]
    grid = list(range(0, 2 * len(counts), 2))
    return tensor.reshape(split).permute(*grid, *[axis + 1 for axis in grid]).reshape(*counts, -1).contiguous()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_flattened_blocks_of_older_releases_are_put_together(models: Any, tmp_path: Path, architecture: str) -> None:
    """In the format fully_sharded_model_space, each rank's block of a tensor is flattened."""
    trained, files = models(architecture)
    tensors = distributed(trained, "fp32_param")
    for name in [name for name in tensors if name.startswith(STATE)]:
        tensors[name] = flattened(name, tensors[name])
    save_distributed(tensors, tmp_path / "dist")
    save_common(tmp_path / "dist", COMMON["param"])
    as_older_metadata(tmp_path / "dist")
    assert_has_moments(tmp_path / "dist", trained, files)


def test_elements_that_do_not_round_to_the_weights_are_not_used(models: Any, tmp_path: Path) -> None:
    """megatron-core 0.16 can write zeros for the last elements of a float32 weight (its format fully_reshardable)."""
    trained, files = models("llama")
    tensors = distributed(trained, "param")
    key = f"{STATE}param.embedding.word_embeddings.weight"
    tensors[key] = tensors[key].clone()
    tensors[key][-1] = 0
    save_distributed(tensors, tmp_path / "dist")
    save_common(tmp_path / "dist", COMMON["param"])
    with opened(tmp_path / "dist", model_files=files) as source:
        found = whole(source)["model.embed_tokens.weight"]
    name = "model.embed_tokens.weight"
    assert torch.equal(found[:-1], trained.expected[name][:-1])
    assert torch.equal(found[-1], trained.weights.state_dict()[name][-1].float())


def test_import_and_convert_keep_moments(models: Any, tmp_path: Path) -> None:
    trained, files = models("qwen2")
    save_distributed(distributed(trained, "param"), tmp_path / "iter_0000003")
    save_common(tmp_path / "iter_0000003", COMMON["param"])
    start, model = tmp_path / "start" / "global_step_3", ["--hf_model_path", str(files)]
    assert main(["import", str(tmp_path / "iter_0000003"), str(start), *model]) == 0
    assert main(["convert", str(tmp_path / "iter_0000003"), str(tmp_path / "dcp"), "--to", "dcp", *model]) == 0
    for folder in (start, tmp_path / "dcp"):
        with opened(folder) as source:
            found = whole(source)
        expected = trained.expected | trained.expected_moments
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def lacking(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{STATE}exp_avg_sq.{FC2}"]


def without_a_layer(tensors: dict[str, Tensor]) -> None:
    tensors[f"{STATE}exp_avg.{FC2}"] = tensors[f"{STATE}exp_avg.{FC2}"][:3]


def turned(tensors: dict[str, Tensor]) -> None:
    tensors[f"{STATE}exp_avg.{FC2}"] = tensors[f"{STATE}exp_avg.{FC2}"].transpose(1, 2).contiguous()


def scalar(tensors: dict[str, Tensor]) -> None:
    tensors[f"{STATE}exp_avg.{FC2}"] = torch.tensor(1.0)


def of_whole_numbers(tensors: dict[str, Tensor]) -> None:
    tensors[f"{STATE}exp_avg.{FC2}"] = tensors[f"{STATE}exp_avg.{FC2}"].to(torch.int32)


def with_more(tensors: dict[str, Tensor]) -> None:
    tensors[f"{STATE}exp_avg.decoder.layers.mlp.router.weight"] = torch.ones(4, 2)


def without_a_master(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{STATE}fp32_param.{FC2}"]


def masters_in_16_bits(tensors: dict[str, Tensor]) -> None:
    tensors[f"{STATE}fp32_param.{FC2}"] = tensors[f"{STATE}fp32_param.{FC2}"].bfloat16()


def masters_twice(tensors: dict[str, Tensor]) -> None:
    tensors[f"{STATE}param.{FC2}"] = tensors[f"{STATE}fp32_param.{FC2}"]


def only(*others: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(STATE)]:
            del tensors[name]
        tensors.update(dict.fromkeys(others, torch.ones(8)))

    return change


BUCKET = "optimizer.distributed.dp_group_idx_0."


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lacking, "no exp_avg_sq of decoder.layers.0.mlp.linear_fc2.weight (4 in all)"),
        (without_a_layer, "exp_avg.decoder.layers.mlp.linear_fc2.weight has the shape [3, "),
        (turned, "exp_avg.decoder.layers.mlp.linear_fc2.weight has the shape [4, 24, 16], the weight has [4, 16, 24]"),
        (scalar, "exp_avg.decoder.layers.mlp.linear_fc2.weight has the shape []"),
        (of_whole_numbers, "exp_avg of decoder.layers.0.mlp.linear_fc2.weight has the dtype torch.int32"),
        (with_more, "exp_avg.decoder.layers.mlp.router.weight, which the model lacks"),
        (without_a_master, "no float32 weights of decoder.layers.0.mlp.linear_fc2.weight"),
        (masters_in_16_bits, "float32 weights of decoder.layers.0.mlp.linear_fc2.weight has the dtype torch.bfloat16"),
        (masters_twice, "have two names, fp32_param and param"),
        (only(), "the folder has none"),
        (only(f"{STATE}momentum_buffer.{FC2}"), "the optimizer has momentum_buffer and is not Adam"),
        (only(f"chained_1.{STATE}exp_avg.{FC2}"), f"of several optimizers (chained_1.{STATE}exp_avg.{FC2})"),
        (
            only(f"{BUCKET}gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"),
            "in the format dp_reshardable (once fully_sharded_bucket_space), whose buckets have no parameter names. "
            "Save with --dist-ckpt-optim-fully-reshardable",
        ),
        (only(f"{BUCKET}param_state/shard_0_1"), "in the format dp_zero_gather_scatter, whose buckets"),
    ],
)
def test_a_strange_state_is_left_out(
    models: Any, tmp_path: Path, spoil: Callable[[dict[str, Any]], None], reason: str
) -> None:
    trained, files = models("llama")
    tensors = distributed(trained, "fp32_param")
    spoil(tensors)
    save_distributed(tensors, tmp_path / "dist")
    save_common(tmp_path / "dist", COMMON["fp32_param"])
    assert_left_out(tmp_path / "dist", trained, files, reason)


class _Unknown:
    """A class that no checkpoint may use."""


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (None, "has no step count"),
        ({"param_groups": [{"lr": 0.1}]}, "has no step count"),
        ({"param_groups": [{"step": 3}, {"step": 4}]}, "has the step counts 3.0, 4.0"),
        ({"state": {"common_step": torch.tensor(-1.0)}}, "has the impossible step count -1"),
        ({"state": {"common_step": torch.tensor(float("nan"))}}, "has the impossible step count nan"),
        (
            {"args": _Unknown()},
            "_Unknown, which is not allowed",
        ),
    ],
)
def test_a_state_without_a_step_count_is_left_out(models: Any, tmp_path: Path, optimizer: Any, reason: str) -> None:
    trained, files = models("llama")
    save_distributed(distributed(trained, "fp32_param"), tmp_path / "dist")
    save_common(tmp_path / "dist", optimizer)
    assert_left_out(tmp_path / "dist", trained, files, "common.pt", reason)
    (tmp_path / "dist" / "common.pt").unlink()
    assert_left_out(tmp_path / "dist", trained, files, "without step count, because", "common.pt is missing")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "stages", "chunks"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2)])
def test_files_of_ranks_give_moments_and_float32_weights(
    models: Any, tmp_path: Path, ranks: int, stages: int, chunks: int, dtype: torch.dtype
) -> None:
    """The splits are tensor, pipeline and virtual pipeline parallel."""
    trained, files = models("qwen2", dtype)
    save_ranks_of(trained, tmp_path, ranks=ranks, stages=stages, chunks=chunks)
    assert_has_moments(tmp_path, trained, files)


def inner_of(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["optimizer"]["optimizer"]
    return found


def in_a_list(content: dict[str, Any]) -> None:
    content["optimizer"] = [content["optimizer"]]


def without_optimizer(content: dict[str, Any]) -> None:
    del content["optimizer"]


def in_other_file(content: dict[str, Any]) -> None:
    del inner_of(content)["state"]


def lose_parameter(content: dict[str, Any]) -> None:
    inner_of(content)["param_groups"][0]["params"].pop()


def other_groups(content: dict[str, Any]) -> None:
    for group in inner_of(content)["param_groups"]:
        group["wd_mult"] = 1.0


def lose_moment(content: dict[str, Any]) -> None:
    del inner_of(content)["state"][0]["exp_avg"]


def reverse(content: dict[str, Any]) -> None:
    inner_of(content)["param_groups"][0]["params"].reverse()


def swap_like(content: dict[str, Any]) -> None:
    """Swap the copies of two layer norms, whose shapes are equal."""
    copies = content["optimizer"]["fp32_from_fp16_params"][1]
    copies[0], copies[-1] = copies[-1], copies[0]


def count_further(content: dict[str, Any]) -> None:
    for entry in inner_of(content)["state"].values():
        entry["step"] += 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (in_a_list, "mp_rank_01_000/model_states.pt has several optimizers"),
        (without_optimizer, "mp_rank_01_000/model_states.pt has no optimizer"),
        (in_other_file, "in the format distrib_optim.pt, whose buckets have no parameter names"),
        (lose_parameter, "the order of the parameters is unknown"),
        (other_groups, "the order of the parameters is unknown: 2 parameter groups"),
        (lose_moment, "the order of the parameters is unknown"),
        (reverse, "the order of the parameters is unknown: ["),
        (swap_like, "the order of the parameters is unknown: the float32 copy of decoder.layers.0"),
        (count_further, "has the step counts 3.0, 4.0"),
    ],
)
def test_a_strange_state_of_one_rank_is_left_out(
    models: Any, tmp_path: Path, spoil: Callable[[dict[str, Any]], None], reason: str
) -> None:
    trained, files = models("llama")
    save_ranks_of(trained, tmp_path, ranks=2)
    path = tmp_path / "mp_rank_01_000" / "model_states.pt"
    content = torch.load(path, weights_only=True)
    spoil(content)
    torch.save(content, path)
    assert_left_out(tmp_path, trained, files, reason)
