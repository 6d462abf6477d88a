"""Verb `test`: equal only when every tensor and the logits are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf.checkpoint.__main__ import main
from rlhf.storage.shards import Shard, Shards
from tests.support import tiny_models
from tests.support.checkpoints import PlainRole, make_checkpointer, make_config, save_steps
from tests.support.interop_page import commands_of
from tests.support.rounding import FLOAT32

WEIGHT = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, Tensor]


class ModelRole(PlainRole):
    """A role with the weights of a model."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    def model_shards(self) -> Shards:
        return {name: Shard(tuple(tensor.shape), (0,), tensor) for name, tensor in self._tensors.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.causal_lm("qwen2", folder)
    return folder


@pytest.fixture
def compare(capsys, model):
    def run(tested: Path, *options) -> tuple[int, dict]:
        code = main([*map(str, ("test", "--local_dir", tested, "--test_hf_dir", model, "--json", *options))])
        out, err = capsys.readouterr()
        assert err == ""
        return code, json.loads(out)

    return run


@pytest.fixture
def changed(model, tmp_path) -> Callable[[Callable[[Tensors], object]], Path]:
    def make(change: Callable[[Tensors], object]) -> Path:
        folder = shutil.copytree(model, tmp_path / "changed", dirs_exist_ok=True)
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


def test_equal_models_are_reported_equal(model, tmp_path, compare, changed):
    config = make_config(tmp_path)
    config.model.path = str(model)
    save_steps(config, ModelRole(load_file(model / "model.safetensors")), 1)
    shutil.move(model / "tokenizer.json", tmp_path)  # the comparison needs no tokenizer
    both = changed(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    for tested in (model, config.run_dir, both):
        code, verdict = compare(tested)
        assert (code, verdict["equal"], verdict["largest"], verdict["logits"]) == (0, True, 0.0, 0.0)
        assert verdict["tensors"] == 26
    shutil.move(tmp_path / "tokenizer.json", model)
    assert compare(model, "--rows", "0")[1]["logits"] is None


def test_values_within_the_tolerance(compare, changed):
    folder = changed(lambda tensors: tensors[WEIGHT][3, 5].add_(0.25))
    code, verdict = compare(folder)
    assert (code, verdict["equal"], list(verdict["values"])) == (1, False, [WEIGHT])
    # Adding 0.25 gives a weight below 2, rounded by at most half a unit in the last place.
    assert verdict["values"][WEIGHT] == verdict["largest"] == pytest.approx(0.25, rel=0, abs=FLOAT32)
    assert 0 < verdict["logits"] < 10
    assert compare(folder, "--atol", "0.2")[0] == 1
    assert compare(folder, "--atol", "10")[0] == 0
    folder = changed(lambda tensors: tensors[WEIGHT][3, 5].fill_(torch.nan))
    code, verdict = compare(folder, "--atol", "1e9")
    assert (code, verdict["largest"], verdict["logits"]) == (1, "nan", "nan")


@pytest.mark.parametrize(
    ("change", "what", "name"),
    [
        (lambda tensors: tensors.pop(WEIGHT), "missing", WEIGHT),
        (lambda tensors: tensors.update({"more.weight": torch.ones(3)}), "extra", "more.weight"),
        (lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].T.contiguous()}), "shapes", WEIGHT),
        (lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].double()}), "dtypes", WEIGHT),
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(512, 16)}), "extra", "lm_head.weight"),
    ],
    ids=["missing", "extra", "shape", "dtype", "a head that is not tied"],
)
def test_missing_extra_or_reshaped_tensors_are_reported(compare, changed, capsys, model, change, what, name):
    folder = changed(change)
    code, verdict = compare(folder, "--atol", "1e9")
    assert code == 1
    assert [name in verdict[key] for key in ("missing", "extra", "shapes", "dtypes")] == [
        key == what for key in ("missing", "extra", "shapes", "dtypes")
    ]
    assert main(["test", "--local_dir", str(folder), "--test_hf_dir", str(model), "--atol", "1e9"]) == 1
    out = capsys.readouterr().out
    assert f"{what.removesuffix('s')}: {name}" in out
    assert ("--ignore-dtype" in out) == (what == "dtypes")
    assert out.endswith("NOT equal within 1e+09\n")


def test_ignore_dtype_compares_values_only(compare, changed):
    folder = changed(lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    code, verdict = compare(folder, "--ignore-dtype", "--atol", "0.5", "--rows", "0")
    assert (code, verdict["dtypes"]) == (0, {})
    assert 0 < verdict["largest"] < 0.01
    assert compare(folder, "--atol", "0.5", "--rows", "0")[0] == 1


def test_the_dtype_of_logits_follows_the_tensors_and_not_the_config(model, tmp_path, compare):
    folder = shutil.copytree(model, tmp_path / "stated")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    code, verdict = compare(folder)
    assert (code, verdict["equal"], verdict["logits"]) == (0, True, 0.0)


def test_a_changed_configuration_shows_in_the_logits(model, tmp_path, compare):
    folder = shutil.copytree(model, tmp_path / "eps")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    code, verdict = compare(folder)
    assert (code, verdict["values"], verdict["dtypes"]) == (1, {}, {})
    assert verdict["logits"] > 0.01


def test_mistakes_get_one_line(model, tmp_path, capsys):
    for options, message in (
        (["--local_dir", tmp_path, "--test_hf_dir", model], "contains no checkpoint of a known layout"),
        (["--local_dir", model, "--test_hf_dir", tmp_path], "has no weights of a Hugging Face model"),
        (["--local_dir", model, "--test_hf_dir", model, "--atol", "-1"], "--atol -1.0 is not a valid tolerance"),
        (["--local_dir", model, "--test_hf_dir", model, "--atol", "nan"], "--atol nan is not a valid tolerance"),
        (["--local_dir", model, "--test_hf_dir", model, "--rows", "-1"], "--rows -1 is negative"),
    ):
        assert main(["test", *map(str, options)]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_the_commands_of_the_page(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config(Path("checkpoints"))
    config.model.path, config.trainer.experiment_name = str(model), "offline"
    role = ModelRole(load_file(model / "model.safetensors"))
    make_checkpointer(config, role, 80, fingerprints={}).save(80)
    commands = commands_of("Exporting to Hugging Face")
    assert [command[0] for command in commands] == ["export", "export", "merge", "test", "test"]
    assert [main(command) for command in commands] == [0] * 5
