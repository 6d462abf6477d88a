"""Verb `import`: its output and files for each layout, and one line for each error in a source."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.checkpoint.__main__ import main
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_USER_ERROR
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import (
    TINY_POLICY,
    equal_bits,
    flip_bit,
    make_backend,
    make_checkpointer,
    make_config,
    whole_state,
    world_of_one,
)
from tests.support.verified import verify


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    with world_of_one(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(scope="module")
def trained():
    return make_backend(1, train_steps=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, trained) -> Path:
    """A checkpoint with all contents, which the tests import like a checkpoint of another tool."""
    config = make_config(tmp_path_factory.mktemp("saved"))
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    make_checkpointer(config, trained, 3).save(3)
    return step_dir(config.run_dir, 3)


def error_line(capsys, *arguments: object) -> str:
    """Return the only line of an error."""
    code = main(["import", *map(str, arguments)])
    line = capsys.readouterr().err
    assert code == EXIT_USER_ERROR
    assert line.count("\n") == 1
    return line


def test_import_prints_imported_and_missing_parts_and_the_start_command(saved, tmp_path, capsys):
    target = tmp_path / "imported" / "global_step_3"
    assert main(["import", str(saved), str(target)]) == EXIT_DONE
    output = capsys.readouterr().out
    assert f"{target}: " in output
    assert "from a checkpoint of layout native" in output
    for line in (
        "actor: weights, 12 tensors",
        "actor: AdamW's moments and step counts",
        "actor: position in the learning rate schedule, after 3 optimizer steps",
        "the random number generators, which are seeded from trainer.seed",
        "the position in the training prompts, which start at the first prompt",
    ):
        assert f"\n  {line}\n" in output
    anew = "The new run does not continue the old run bit for bit. These parts start anew:"
    assert output.index("A new run continues with:") < output.index(anew)
    begin = f"trainer.resume_mode=resume_path trainer.resume_from_path={target}"
    assert f"python -m rlhf.train model.path={target}/actor/huggingface {begin}\n" in output
    assert main(["inspect", str(target)]) == EXIT_DONE
    assert f"imported from    {saved} (native)\n" in capsys.readouterr().out


def test_import_json_has_the_same_facts(saved, tmp_path, capsys):
    target = tmp_path / "global_step_7"
    assert main(["import", str(saved), str(target), "--json"]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["layout"], found["step"]) == (str(target), "native", 7)
    assert found["contents"] == ["model", "hf_model", "optimizer", "extra"]
    assert found["bytes"] == verify(target).total_bytes
    assert len(found["taken"]) == 3
    assert found["start"][2] == f"trainer.resume_from_path={target}"


def test_an_import_of_a_checkpoint_has_its_bits(saved, trained, tmp_path, capsys):
    """The import has equal weights and moments, and a Hugging Face folder that can be `model.path`."""
    target = tmp_path / "global_step_3"
    assert main(["import", str(saved), str(target)]) == EXIT_DONE
    capsys.readouterr()
    assert main(["diff", str(saved), str(target), "--only", "weights", "--only", "moments"]) == EXIT_DONE
    assert capsys.readouterr().out == "actor's weights: equal, 12 tensors\nactor's moments: equal, 36 tensors\n"
    folder = target / "actor" / "huggingface"
    assert equal_bits(load_file(folder / "model.safetensors"), whole_state(trained)["model"])
    again = tmp_path / "again" / "global_step_0"
    assert main(["import", str(folder), str(again)]) == EXIT_DONE, "the folder must be a whole model"


def test_the_type_of_a_source_is_kept_beside_the_float32_that_is_trained(tmp_path, capsys):
    source = shutil.copytree(TINY_POLICY, tmp_path / "source")
    tensors = {name: t.bfloat16() for name, t in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    target = tmp_path / "global_step_0"
    assert main(["import", str(source), str(target)]) == EXIT_DONE
    assert equal_bits(load_file(target / "actor" / "huggingface" / "model.safetensors"), tensors)
    shards = load_file(target / "actor" / "model" / "rank_00000.safetensors")
    assert {tensor.dtype for tensor in shards.values()} == {torch.float32}
    for name, tensor in shards.items():
        assert torch.equal(tensor, tensors[name].float().reshape(-1)), name
    assert "actor: the optimizer's moments" in capsys.readouterr().out, "a folder has none"


def test_mistakes_are_one_line_and_write_nothing(saved, tmp_path, capsys):
    target = tmp_path / "targets" / "global_step_3"
    line = error_line(capsys, saved, tmp_path / "targets")
    start = f"error: {tmp_path}/targets must be named global_step_N, where N is the step after which a run begins:"
    assert line.startswith(start)
    assert line.endswith(f"give {tmp_path}/targets/global_step_3, or another step.\n")
    assert "does not exist" in error_line(capsys, tmp_path / "nothing", target)
    assert "no DeepSpeed save" in error_line(capsys, saved, target, "--backend", "deepspeed")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(TINY_POLICY / "model.safetensors", bare)
    assert "--hf_model_path" in error_line(capsys, bare, target)
    other = saved / "actor" / "huggingface"
    assert f"that config.json of {other} " in error_line(capsys, bare, target, "--hf_model_path", other)
    assert not target.parent.exists()
    assert main(["import", str(bare), str(target), "--hf_model_path", str(TINY_POLICY)]) == EXIT_DONE
    capsys.readouterr()
    assert "--overwrite" in error_line(capsys, bare, target, "--hf_model_path", TINY_POLICY)
    within = target / "global_step_1"
    assert "is in the checkpoint" in error_line(capsys, bare, within, "--hf_model_path", TINY_POLICY)
    assert f"{saved} contains the source" in error_line(capsys, saved, saved, "--overwrite")


def test_damage_is_one_line_and_leaves_no_target(saved, tmp_path, capsys):
    copy = shutil.copytree(saved, tmp_path / "copy" / "global_step_3")
    shards = copy / "actor" / "optimizer" / "rank_00000.safetensors"
    flip_bit(shards, 8 * (shards.stat().st_size - 1))
    target = tmp_path / "targets" / "global_step_3"
    assert main(["import", str(copy), str(target)]) == EXIT_CRASHED
    line = capsys.readouterr().err
    assert line == f"error: {copy} is damaged: actor/optimizer/rank_00000.safetensors: content differs from its hash\n"
    assert list(target.parent.iterdir()) == []
