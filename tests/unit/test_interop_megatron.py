"""Converts Megatron's rank folders to a model of transformers, and back."""

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from rlhf.checkpoint.__main__ import main
from rlhf.convert import torch_file
from rlhf.convert.megatron import columns, layout_megatron
from rlhf.convert.megatron.megatron_folder import write_megatron_folder
from rlhf.convert.megatron.megatron_model import read_model
from rlhf.errors import UserError
from rlhf.models.hf.source import Origin, TensorSource
from rlhf.storage.disk_errors import DamagedCheckpoint
from tests.support.interop_page import commands_of
from tests.support.megatron_states import rank_weights, save_ranks
from tests.support.refusals import says, user_error
from tests.support.sources import opened, whole
from tests.support.tiny_models import causal_lm, save, tiny_config

SPLITS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)]
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PreTrainedModel, Path]]:
    """A model of an architecture and its folder, made once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, PreTrainedModel] = {}

    def get(architecture: str) -> tuple[PreTrainedModel, Path]:
        if architecture not in made:
            made[architecture] = causal_lm(architecture, root / architecture, **SIZES)
        return made[architecture], root / architecture

    return get


def assert_is(source: TensorSource, model: PreTrainedModel, chunk: int | None = None) -> None:
    """Check that the source has exactly the model's tensors, bit for bit."""
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    found = whole(source, chunk)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["num_attention_heads", "num_hidden_layers"])
def test_a_size_of_zero_is_a_users_mistake(models: Any, tmp_path: Path, name: str) -> None:
    config = json.loads((models("qwen2")[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: 0, "head_dim": None}))
    says(user_error(read_model, tmp_path), f"{name}=0", "config.json", "at least 1")


@pytest.mark.parametrize(("ranks", "stages", "chunks"), SPLITS)
def test_every_split_of_ranks_gives_the_whole_model(
    models: Any, tmp_path: Path, ranks: int, stages: int, chunks: int
) -> None:
    """The splits are tensor, pipeline and virtual pipeline parallel."""
    model, folder = models("qwen2")
    save_ranks(model, tmp_path, ranks=ranks, stages=stages, chunks=chunks)
    with opened(tmp_path, model_files=folder) as source:
        assert source.layout == "megatron"
        assert_is(source, model, chunk=101)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_written_folders_of_ranks_hold_what_whole_tensor_operations_make(
    models: Any, tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's written file equals the reference split of the model, and the folder is read back as the model."""
    monkeypatch.setattr(columns, "ROWS_BYTES", 300)
    monkeypatch.setattr(torch_file, "SLAB_BYTES", 700)
    model, folder = models(architecture)
    with opened(folder) as source:
        write_megatron_folder(source, tmp_path / "new", tensor_ranks=2, pipeline_ranks=2, layout="mp_rank")
    for rank in range(2):
        for stage in range(2):
            path = tmp_path / "new" / f"mp_rank_{rank:02d}_{stage:03d}" / "model_states.pt"
            found = torch.load(path, weights_only=True)["model"]
            (expected,) = rank_weights(model, rank, 2, stage, 2)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with opened(tmp_path / "new") as source:
        assert_is(source, model)


def test_a_critics_folder_gives_its_value_head(tmp_path: Path) -> None:
    """In a critic, verl replaces the output layer by a layer with one output."""
    config = tiny_config("llama", num_labels=1)
    model = AutoModelForTokenClassification.from_config(config)
    folder = tmp_path / "global_step_5" / "critic"
    save(model, folder / "huggingface")
    save_ranks(model, folder / "model", ranks=2, stages=2)
    with opened(tmp_path / "global_step_5", role="critic") as source:
        assert_is(source, model)
    merged = tmp_path / "merged"
    assert main(["merge", "--local_dir", str(folder), "--target_dir", str(merged), "--is-value-model"]) == 0
    found = AutoModelForTokenClassification.from_pretrained(merged).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_megatrons_arguments_and_random_state_are_ignored(models: Any, tmp_path: Path) -> None:
    """The newest iteration is read; Megatron-LM's files also have its arguments and random state."""
    model, folder = models("llama")
    beside: dict[str, Any] = {
        "iteration": 20,
        "args": Namespace(lr=0.1),
        "rng_state": [{"np_rng_state": np.random.get_state()}],
    }
    save_ranks(model, tmp_path / "iter_0000020", **beside)
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    with opened(tmp_path, model_files=folder) as source:
        assert_is(source, model)
    with pytest.raises(UserError, match="iter_0000010 has no folders mp_rank_XX_YYY"):
        layout_megatron.open_source(Origin(tmp_path, tag="iter_0000010", model_files=folder))


class _Runs:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ran",)


def lose_file(root: Path, _: Path) -> None:
    (root / "mp_rank_01_001" / "model_states.pt").unlink()


def lose_rank(root: Path, _: Path) -> None:
    shutil.rmtree(root / "mp_rank_01_000")


def lose_tensor_ranks(root: Path, _: Path) -> None:
    for name in ("mp_rank_01_000", "mp_rank_01_001"):
        shutil.rmtree(root / name)


def lose_stage(root: Path, _: Path) -> None:
    for name in ("mp_rank_00_001", "mp_rank_01_001"):
        shutil.rmtree(root / name)


def cut_off(root: Path, _: Path) -> None:
    path = root / "mp_rank_01_000" / "model_states.pt"
    os.truncate(path, path.stat().st_size // 2)


def run_code(root: Path, _: Path) -> None:
    torch.save({"model": _Runs()}, root / "mp_rank_01_000" / "model_states.pt")


def drop_tensor(root: Path, _: Path) -> None:
    path = root / "mp_rank_01_000" / "model_states.pt"
    content = torch.load(path, weights_only=True)
    del content["model"]["decoder.layers.1.mlp.linear_fc2.weight"]
    torch.save(content, path)


def add_tensor(root: Path, _: Path) -> None:
    for rank in range(2):
        path = root / f"mp_rank_{rank:02d}_000" / "model_states.pt"
        content = torch.load(path, weights_only=True)
        content["model"]["decoder.layers.1.mlp.router.weight"] = torch.ones(2)
        torch.save(content, path)


def config_pipe(_: Path, files: Path) -> None:
    (files / "config.json").unlink()
    os.mkfifo(files / "config.json")


def change_config(**settings: Any) -> Callable[[Path, Path], None]:
    def change(_: Path, files: Path) -> None:
        config = json.loads((files / "config.json").read_text()) | settings
        (files / "config.json").write_text(json.dumps(config))

    return change


def swap_stages(root: Path, _: Path) -> None:
    for rank in range(2):
        (root / f"mp_rank_{rank:02d}_000").rename(root / "aside")
        (root / f"mp_rank_{rank:02d}_001").rename(root / f"mp_rank_{rank:02d}_000")
        (root / "aside").rename(root / f"mp_rank_{rank:02d}_001")


def mix_iterations(root: Path, _: Path) -> None:
    for number, path in enumerate(sorted(root.glob("*/model_states.pt"))):
        torch.save(torch.load(path, weights_only=True) | {"iteration": 20 + number // 3}, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_file, "mp_rank_01_001 has no model_states.pt"),
        (lose_rank, "lacks mp_rank_01_000 of 2 x 2 ranks"),
        (lose_tensor_ranks, r"expected of 1 tensor parallel rank: another rank's folder is missing"),
        (lose_stage, r"has no decoder.layers.2.self_attention.linear_qkv.layer_norm_weight\. Restore"),
        (cut_off, "mp_rank_01_000/model_states.pt is not an intact torch.save file"),
        (run_code, "uses posix.system"),
        (drop_tensor, "and .*mp_rank_00_000/model_states.pt have different tensors"),
        (
            swap_stages,
            "word_embeddings.weight is not in the first pipeline stage: the ranks' folders are mixed up",
        ),
        (mix_iterations, "mp_rank_01_001/model_states.pt is of iteration 21, .*mp_rank_00_000/model_states.pt of 20"),
        (add_tensor, r"has decoder.layers.1.mlp.router.weight, which transformers' llama lacks"),
        (change_config(model_type="gemma"), "model_type=gemma .* supports llama, mistral, qwen2 and qwen3 only"),
        (change_config(num_hidden_layers=3), "decoder.layers.3.* which transformers' llama lacks"),
        (change_config(vocab_size=100_000), r"word_embeddings.weight has the shape \[256, 16\] where \[50000, 16\]"),
        (
            change_config(intermediate_size=25),
            "ranks=2 does not divide the model's 25 int.* Set --hf_model_path",
        ),
        (change_config(attention_bias=True), "attention_bias=true"),
        (config_pipe, "config.json is not a config.json of transformers: .* is not a regular file"),
    ],
)
def test_a_broken_folder_gets_one_line(models: Any, tmp_path: Path, spoil: Any, message: str) -> None:
    """The line says what is wrong, where, and what to do."""
    model, folder = models("llama")
    root, files = tmp_path / "ranks", tmp_path / "files"
    save_ranks(model, root, ranks=2, stages=2)
    shutil.copytree(folder, files)
    spoil(root, files)
    with pytest.raises((UserError, DamagedCheckpoint), match=message) as error:
        opened(root, model_files=files).__enter__()
    assert "\n" not in str(error.value)
    assert not Path("/tmp/ran").exists()


def test_what_cannot_be_split_is_refused_before_anything_is_written(models: Any, tmp_path: Path) -> None:
    """The error names the flag, its value, and the number that it does not divide."""
    _, folder = models("llama")
    with opened(folder) as source:
        with pytest.raises(UserError, match=r"--tp=4 does not divide .* 2 key-value heads\. Set --tp to one of 1, 2\."):
            write_megatron_folder(source, tmp_path / "new", tensor_ranks=4)
        with pytest.raises(UserError, match=r"--pp=3 does not divide .* 4 layers\. Set --pp to one of 1, 2, 4\."):
            write_megatron_folder(source, tmp_path / "new", pipeline_ranks=3)
    assert not list(tmp_path.iterdir())


def test_the_documented_commands_work(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each command of `From and to Megatron` in docs/interop.md, on folders in verl's and Megatron-LM's layout."""
    model, folder = models("qwen2")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "my_model")
    actor = tmp_path / "checkpoints/verl/grpo/global_step_20/actor"
    with opened(folder) as source:
        write_megatron_folder(source, actor / "dist_ckpt")
    (actor / "dist_ckpt" / "huggingface").rename(actor / "huggingface")
    for iteration, ranks in ((10, 1), (20, 2)):
        save_ranks(model, tmp_path / "megatron_lm" / f"iter_{iteration:07d}", ranks=ranks, stages=2, chunks=2)
    (tmp_path / "megatron_lm" / "latest_checkpointed_iteration.txt").write_text("20")
    for arguments in commands_of("From and to Megatron"):
        assert main(arguments) == 0
        if arguments[0] == "merge":
            target = arguments[arguments.index("--target_dir") + 1]
        else:
            target = "back"
            written = next(name for name in arguments if name.startswith("to_"))
            assert main(["merge", "--local_dir", written, "--target_dir", target, "--overwrite"]) == 0
        merged = AutoModelForCausalLM.from_pretrained(target, dtype="auto").state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(merged[name], tensor), name
    assert len(list(Path("to_ranks").glob("mp_rank_*"))) == 4
