"""Checkpoints as the Trainer of transformers lays them out: weights, and moments by the optimizer's order."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlhf.checkpoint.__main__ import main
from rlhf.convert.layouts import open_source
from rlhf.errors import UserError
from rlhf.models.hf.source import Origin
from rlhf.storage.disk_errors import DamagedCheckpoint
from tests.support.adapted import Q, save_adapter
from tests.support.interop_page import commands_of
from tests.support.tiny_models import causal_lm

Moments = dict[str, torch.Tensor]


def train(model: PreTrainedModel, folder: Path, second: Callable[[str, torch.Tensor], bool] | None) -> Moments:
    """Train two steps, save like the Trainer, return moments by name. `second` selects the second group's weights."""
    named = dict(model.named_parameters())
    groups = [[n for n, p in named.items() if second is None or not second(n, p)]]
    groups += [[n for n in named if n not in groups[0]]] if second is not None else []
    optimizer = torch.optim.AdamW([{"params": [named[n] for n in names]} for names in groups], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        tokens = torch.arange(8)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 40, "epoch": 1.5}))
    return {f"{n}.{key}": value for n, p in named.items() for key, value in optimizer.state[p].items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Moments]:
    folder = tmp_path_factory.mktemp("trainer") / "checkpoint-40"
    model = causal_lm("qwen2", folder)
    return folder, train(model, folder, lambda name, parameter: parameter.ndim < 2)


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoint-40"))


def test_weights_moments_and_progress_are_read(saved):
    folder, moments = saved
    source = open_source(Origin(folder))
    assert source.layout == "trainer"
    assert "lm_head.weight" not in source.contents.tensors
    assert source.contents.moments.keys() == moments.keys()
    for name, info in source.contents.moments.items():
        assert torch.equal(source.read(name, 0, info.numel), moments[name].reshape(-1)), name
    progress = source.contents.progress
    assert (progress.step, progress.optimizer_steps) == (40, 2)
    assert progress.schedule is not None
    assert progress.schedule["last_epoch"] == 2
    assert source.contents.model_files == folder
    assert source.contents.absent == ["the position in the training data and the state of the algorithm"]


@pytest.mark.parametrize("second", [None, lambda name, parameter: "bias" in name])
def test_other_groups_of_the_optimizer(second, tmp_path):
    moments = train(causal_lm("qwen2", tmp_path), tmp_path, second)
    source = open_source(Origin(tmp_path))
    assert source.contents.moments.keys() == moments.keys()
    for name, info in source.contents.moments.items():
        assert torch.equal(source.read(name, 0, info.numel), moments[name].reshape(-1)), name


def test_weights_in_pickles(copy):
    torch.save({"model.norm.weight": torch.ones(16)}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    source = open_source(Origin(copy))
    assert torch.equal(source.read("model.norm.weight", 0, 16), torch.ones(16))
    assert any("moments: the weights have no model.embed_tokens.weight" in line for line in source.contents.absent)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda state: None, "no optimizer.pt"),
        (lambda state: state | {"param_groups": state["param_groups"] * 2}, "parameters are not the Trainer's"),
        (lambda state: state | {"param_groups": state["param_groups"][::-1]}, "parameters are not the Trainer's"),
        (lambda state: state | {"state": {0: state["state"][1]}}, "parameters are not the Trainer's"),
        (lambda state: state | {"state": {0: {"momentum_buffer": torch.ones(2)}}}, "is not plain Adam"),
        (lambda state: {"optimizer": state}, "is not from an optimizer of torch"),
    ],
)
def test_moments_that_do_not_match_the_model_are_left_out(change, expected, copy):
    state = change(torch.load(copy / "optimizer.pt", weights_only=True))
    (copy / "optimizer.pt").unlink()
    if state is not None:
        torch.save(state, copy / "optimizer.pt")
    source = open_source(Origin(copy))
    assert not source.contents.moments
    assert source.contents.absent[0].startswith("the optimizer's moments: ")
    assert expected in source.contents.absent[0]
    assert source.contents.progress.step == 40


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -5.0, 1e30])
def test_an_impossible_step_count_is_damage(count, copy, tmp_path, capsys):
    """NaN was a traceback, and -5 was imported."""
    state = torch.load(copy / "optimizer.pt", weights_only=True)
    state["state"][0]["step"].fill_(count)
    torch.save(state, copy / "optimizer.pt")
    assert main(["import", str(copy), str(tmp_path / "global_step_7")]) == 1
    assert f"has the step count {count:g}" in capsys.readouterr().err
    assert not (tmp_path / "global_step_7").exists()


def test_the_documented_commands_work(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved[0], "output/checkpoint-40")
    causal_lm("llama", tmp_path / "base")
    save_adapter(tmp_path / "base", Path("output_lora/checkpoint-40"))
    for command in commands_of("From Trainer and TRL"):
        assert main(command) == 0
    weights = load_file(saved[0] / "model.safetensors")
    merged = load_file("merged/model.safetensors")
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in weights.items())
    base, adapted = load_file("base/model.safetensors"), load_file("merged_lora/model.safetensors")
    assert adapted.keys() == base.keys()
    assert not torch.equal(adapted[f"{Q}.weight"], base[f"{Q}.weight"])
    start = open_source(Origin(Path("start/global_step_40")))
    for name, tensor in saved[1].items():
        assert torch.equal(start.read(name, 0, tensor.numel()), tensor.reshape(-1)), name


def test_what_is_missing_or_broken(copy):
    (copy / "scheduler.pt").unlink()
    assert "the learning rate schedule: no scheduler.pt" in open_source(Origin(copy)).contents.absent
    (copy / "trainer_state.json").write_text("{")
    with pytest.raises(DamagedCheckpoint, match=r"trainer_state\.json is not valid JSON"):
        open_source(Origin(copy))
    (copy / "trainer_state.json").write_text("{}")
    (copy / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights of a Hugging Face model"):
        open_source(Origin(copy))
