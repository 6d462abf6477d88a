"""Verb `diff`: compares two checkpoints of any layouts bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.checkpoint.__main__ import main
from rlhf.convert import differences
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_USER_ERROR
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import (
    flip_bit,
    make_backend,
    make_checkpointer,
    make_config,
    make_driver,
    world_of_one,
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """Two checkpoints of one run, of steps 3 and 4, with all contents. The second has another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    with world_of_one(folder):
        config = make_config(folder)
        config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
        backend = make_backend(1, train_steps=3)
        make_checkpointer(config, backend, 3).save(3)
        ids = torch.arange(10).view(2, 5)
        backend.backward(backend.module(input_ids=ids).logits.float().square().mean())
        backend.optimizer_step()
        config.actor.optim.lr = 0.25
        make_checkpointer(config, backend, 4, driver=make_driver(4)).save(4)
    return step_dir(config.run_dir, 3), step_dir(config.run_dir, 4)


def diff(capsys, *arguments: object) -> tuple[int, str]:
    code = main(["diff", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_a_copy_is_equal(checkpoints, tmp_path, capsys):
    copy = shutil.copytree(checkpoints[0], tmp_path / "copy" / "global_step_3")
    code, output = diff(capsys, checkpoints[0], copy)
    assert code == EXIT_DONE
    assert output.splitlines() == [
        "config: equal",
        "driver state: equal",
        "actor's progress: equal",
        "actor's weights: equal, 12 tensors",
        "actor's moments: equal, 36 tensors",
    ]


def test_differing_settings_state_weights_and_moments_are_named(checkpoints, capsys, monkeypatch):
    monkeypatch.setattr(differences, "RANGE_BYTES", 400)
    a, b = checkpoints
    code, output = diff(capsys, a, b, "--json")
    assert code == EXIT_CRASHED
    found = json.loads(output)
    assert found["equal"] is False
    assert found["values"]["config"] == [{"key": "actor.optim.lr", "a": 1e-06, "b": 0.25}]
    assert {"key": "step", "a": 3, "b": 4} in found["values"]["driver state"]
    weights = found["tensors"]["actor's weights"]
    left, right = (load_file(x / "actor" / "huggingface" / "model.safetensors") for x in checkpoints)
    assert weights["tensors"] == len(left)
    assert {difference["name"] for difference in weights["different"]} == set(left)
    for difference in weights["different"]:
        name = difference["name"]
        assert difference["what"] == "values"
        expected = (left[name].double() - right[name].double()).abs().max()
        assert difference["largest"] == float(expected)
        assert difference["norm_a"] == pytest.approx(float(left[name].double().norm()), rel=1e-12)
        assert difference["norm_b"] == pytest.approx(float(right[name].double().norm()), rel=1e-12)
    assert len(found["tensors"]["actor's moments"]["different"]) == 36


def test_the_largest_differences_come_first_and_the_rest_is_counted(checkpoints, capsys):
    code, output = diff(capsys, *checkpoints, "--only", "weights", "--largest", 2)
    assert code == EXIT_CRASHED
    first, *shown, more = output.splitlines()
    assert first == "actor's weights: 12 of 12 tensors differ"
    assert len(shown) == 2
    assert more == "  and 10 more (--largest 0 shows all)"
    code, output = diff(capsys, *checkpoints, "--only", "weights", "--largest", 0)
    sizes = [float(line.rpartition(" ")[2]) for line in output.splitlines()[1:]]
    assert len(sizes) == 12
    assert sizes == sorted(sizes, reverse=True)
    assert shown == output.splitlines()[1:3]


def test_layouts_may_differ(checkpoints, capsys):
    code, output = diff(capsys, checkpoints[0], checkpoints[0] / "actor" / "huggingface", "--only", "weights")
    assert (code, output) == (EXIT_DONE, "actor's weights: equal, 12 tensors\n")
    code, output = diff(capsys, checkpoints[0], checkpoints[0] / "actor" / "huggingface")
    assert code == EXIT_CRASHED
    assert "actor's moments: 36 of 36 tensors differ" in output
    assert "only in A, float32 [" in output


def test_missing_tensors_shapes_dtypes_and_nans_are_listed_first(checkpoints, tmp_path, capsys):
    source = checkpoints[0] / "actor" / "huggingface"
    tensors = load_file(source / "model.safetensors")
    copy = shutil.copytree(source, tmp_path / "copy")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    tensors["model.norm.weight"][3] = float("nan")
    tensors["extra"] = torch.ones(2)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:5].clone()
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors")
    code, output = diff(capsys, source, copy, "--only", "weights")
    assert code == EXIT_CRASHED
    lines = output.splitlines()
    assert lines[0] == "actor's weights: 5 of 13 tensors differ"
    assert lines[1] == "  extra: only in B, (none) | float32 [2]"
    assert lines[2].startswith("  model.embed_tokens.weight: shape, float32 [515, 12] | float32 [5, 12]")
    assert lines[3].startswith("  model.layers.0.mlp.up_proj.weight: only in A, float32 [17, 12] | (none)")
    assert lines[4].startswith("  model.norm.weight: values, float32 [12], norm 3.38")
    assert lines[4].endswith("| nan, largest difference nan")
    assert lines[5].startswith("  lm_head.weight: dtype, float32 [515, 12] | bfloat16 [515, 12], norm ")
    _, output = diff(capsys, source, copy, "--only", "weights", "--json")
    assert '"largest": "nan"' in output


def test_a_sign_of_zero_is_a_difference(checkpoints, tmp_path, capsys):
    source = checkpoints[0] / "actor" / "huggingface"
    tensors = load_file(source / "model.safetensors")
    for name, zero in (("a", 0.0), ("b", -0.0)):
        tensors["model.norm.weight"][0] = zero
        shutil.copytree(source, tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors")
    code, output = diff(capsys, tmp_path / "a", tmp_path / "b", "--only", "weights")
    assert code == EXIT_CRASHED
    assert "model.norm.weight: values" in output
    assert "largest difference 0" in output


def test_a_critic_in_only_one_checkpoint_is_reported_missing(checkpoints, tmp_path, capsys):
    with world_of_one(tmp_path):
        config = make_config(tmp_path)
        make_checkpointer(config, {"actor": make_backend(1, train_steps=3), "critic": make_backend(2)}, 3).save(3)
    code, output = diff(capsys, checkpoints[0], step_dir(config.run_dir, 3), "--only", "weights", "--largest", 1)
    assert code == EXIT_CRASHED
    assert "actor's weights: equal, 12 tensors" in output
    assert "critic's weights: 12 of 12 tensors differ" in output
    assert "only in B" in output


def test_mistakes_and_damage_are_one_line(checkpoints, tmp_path, capsys):
    assert main(["diff", str(checkpoints[0]), str(tmp_path / "nothing")]) == EXIT_USER_ERROR
    assert main(["diff", str(checkpoints[0]), str(checkpoints[1]), "--largest", "-1"]) == EXIT_USER_ERROR
    copy = shutil.copytree(checkpoints[0], tmp_path / "copy" / "global_step_3")
    flip_bit(copy / "actor" / "model" / "rank_00000.safetensors", 8 * 5000)
    assert main(["diff", str(checkpoints[0]), str(copy)]) == EXIT_CRASHED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: {tmp_path / 'nothing'} does not exist. Give the folder of a checkpoint."
    assert lines[1] == "error: --largest -1 is negative. Give the number of lines, or 0 for all."
    damaged = f"error: {copy} is damaged: actor/model/rank_00000.safetensors"
    assert lines[2].startswith(f"{damaged}: content differs from its hash")
    assert len(lines) == 3
