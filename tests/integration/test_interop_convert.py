"""Verb `convert`: a conversion to any layout that it writes, and back, gives the same bits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.checkpoint.__main__ import main
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import equal_bits, make_backend, make_checkpointer, make_config, world_of_one
from tests.support.tiny_models import causal_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Hugging Face folder in bfloat16."""
    folder = tmp_path_factory.mktemp("model")
    causal_lm("llama", folder)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A native checkpoint with moments and a schedule."""
    folder = tmp_path_factory.mktemp("saved")
    config = make_config(folder)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    with world_of_one(folder):
        make_checkpointer(config, make_backend(1, train_steps=3), 3).save(3)
    return step_dir(config.run_dir, 3)


def convert(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments)]) == EXIT_DONE


def command_error(capsys, *arguments: object) -> str:
    assert main(["convert", *map(str, arguments)]) == EXIT_USER_ERROR
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


WAYS = {
    "native": ["native"],
    "dcp": ["dcp"],
    "megatron": ["megatron"],
    "megatron of 4 ranks": ["megatron", "--megatron-layout", "mp_rank", "--tp", 2, "--pp", 2],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_model_converted_to_any_layout_and_back_has_the_same_bits(model, tmp_path, way):
    there, back = tmp_path / "global_step_0", tmp_path / "back"
    convert(model, there, "--to", *way)
    convert(there, back, "--to", "hf", "--dtype", "bfloat16")
    expected, found = (load_file(folder / "model.safetensors") for folder in (model, back))
    assert equal_bits(found, expected)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    assert (back / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_moments_converted_to_any_layout_and_back_have_the_same_bits(saved, tmp_path, capsys):
    """Convert to torch DCP, and from there back to a native checkpoint."""
    convert(saved, tmp_path / "dcp", "--to", "dcp")
    convert(tmp_path / "dcp", tmp_path / "global_step_3", "--to", "native")
    capsys.readouterr()
    only = ["--only", "weights", "--only", "moments"]
    assert main(["diff", str(saved), str(tmp_path / "global_step_3"), *only]) == EXIT_DONE, capsys.readouterr().out
    assert capsys.readouterr().out == "actor's weights: equal, 12 tensors\nactor's moments: equal, 36 tensors\n"


def test_the_words_of_verls_converter_are_understood(model, tmp_path):
    options = ["--hf_model_path", model, "--output_path", tmp_path / "megatron", "--use_cpu_initialization"]
    convert("--to", "megatron", *options, "--tp", 2, "--pp", 1)
    assert (tmp_path / "megatron" / "metadata.json").is_file()
    convert(tmp_path / "megatron", tmp_path / "back", "--to", "hf", "--use-cpu-initialization")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back["lm_head.weight"], load_file(model / "model.safetensors")["lm_head.weight"])


def test_json_says_what_was_written(model, tmp_path, capsys):
    convert(model, tmp_path / "dcp", "--to", "dcp", "--json", "--dtype", "float32")
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["layout"], found["dtypes"]) == (str(tmp_path / "dcp"), "huggingface", ["float32"])
    assert found["files"] == {
        str(path.relative_to(tmp_path / "dcp")): path.stat().st_size
        for path in (tmp_path / "dcp").rglob("*")
        if path.is_file()
    }


def test_mistakes_are_one_line_and_write_nothing(model, tmp_path, capsys):
    target = tmp_path / "targets" / "x"
    assert "must be named global_step_N" in command_error(capsys, model, target, "--to", "native")
    assert "--tp is for --to megatron, not for --to hf" in command_error(capsys, model, target, "--to", "hf", "--tp", 2)
    assert "--dtype is for --to hf or dcp or megatron, not" in command_error(
        capsys, model, target.with_name("global_step_1"), "--to", "native", "--dtype", "bfloat16"
    )
    assert "Give SOURCE and TARGET, or" in command_error(capsys, model, "--to", "hf")
    assert "Give one target" in command_error(capsys, model, target, "--to", "hf", "--output_path", tmp_path / "y")
    assert "--tp=3" in command_error(capsys, model, target, "--to", "megatron", "--tp", 3)
    assert "--pp=0" in command_error(capsys, model, target, "--to", "megatron", "--pp", 0)
    assert "contains the source" in command_error(capsys, model, model, "--to", "dcp", "--overwrite")
    assert not target.parent.exists() or not any(target.parent.iterdir())
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model / "model.safetensors", bare)
    assert "--hf_model_path" in command_error(capsys, bare, target, "--to", "megatron")
    assert not target.parent.exists() or not any(target.parent.iterdir())
