"""Checkpoints that verl's own manager saves, merged by us and by verl's own merger."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.checkpoint.__main__ import main
from rlhf.convert.layouts import open_source
from rlhf.models.hf.source import Origin
from tests.support.peers import run_in_peers
from tests.support.tiny_models import causal_lm

pytestmark = pytest.mark.peers
SCRIPT = Path(__file__).parents[1] / "support" / "verl_saves.py"
WHOLE = ("llama/fsdp/2", "qwen2/fsdp/2", "qwen2/fsdp2/2", "llama/fsdp2/1")
ADAPTED = ("llama/fsdp/2/lora", "qwen2/fsdp2/2/lora")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("verl")
    for architecture in ("llama", "qwen2"):
        causal_lm(architecture, root / "models" / architecture)
    run_in_peers(SCRIPT, root / "models", root, *WHOLE, *ADAPTED)
    return root


def merge(folder: Path, target: Path, *options: str) -> Path:
    assert main(["merge", "--local_dir", str(folder), "--target_dir", str(target), *options]) == 0
    return target


@pytest.mark.parametrize("case", WHOLE)
def test_a_merge_has_the_weights_that_were_trained_and_verl_s_merge_rounds(case, saved, tmp_path):
    target = merge(saved / case / "global_step_2", tmp_path / "merged")
    truth = torch.load(saved / case / "truth.pt", weights_only=True)["tensors"]
    if case.startswith("qwen2"):
        del truth["lm_head.weight"]
    ours = load_file(target / "model.safetensors")
    assert ours.keys() == truth.keys()
    assert all(torch.equal(ours[name], truth[name]) for name in truth)
    theirs = load_file(saved / case / "merged" / "model.safetensors")
    assert all(torch.equal(theirs[name], ours[name].bfloat16()) for name in ours)
    assert theirs.keys() - ours.keys() <= {"lm_head.weight"}
    rounded = merge(saved / case / "global_step_2" / "actor", tmp_path / "rounded", "--dtype", "bfloat16")
    for name, tensor in load_file(rounded / "model.safetensors").items():
        assert torch.equal(tensor, theirs[name])
    tokens = torch.arange(24).view(2, 12)
    logits = [
        AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (rounded, saved / case / "merged")
    ]
    assert torch.equal(*logits)
    assert AutoTokenizer.from_pretrained(target).chat_template is not None


@pytest.mark.parametrize("case", WHOLE)
def test_moments_are_those_of_verl_s_optimizer(case, saved):
    source = open_source(Origin(saved / case / "global_step_2"))
    moments = torch.load(saved / case / "truth.pt", weights_only=True)["moments"]
    expected = {f"{name}.{key}": value for name, state in moments.items() for key, value in state.items()}
    assert source.contents.moments.keys() == expected.keys()
    for name, tensor in expected.items():
        info = source.contents.moments[name]
        assert torch.equal(source.read(name, 0, info.numel), tensor.reshape(-1)), name
    assert source.contents.progress.step == source.contents.progress.optimizer_steps == 2
    assert source.contents.progress.schedule is not None
    assert source.contents.progress.schedule["last_epoch"] == 2


@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_are_merged_as_peft_merges_them_or_kept(case, saved, tmp_path, capsys):
    folder = saved / case / "global_step_2" / "actor"
    assert main(["merge", "--local_dir", str(folder), "--target_dir", str(tmp_path / "x")]) == 2
    assert "--adapter=merge" in capsys.readouterr().err
    truth = torch.load(saved / case / "truth.pt", weights_only=True)["merged"]
    ours = load_file(merge(folder, tmp_path / "merged", "--adapter", "merge") / "model.safetensors")
    assert all(torch.equal(ours[name], truth[name]) for name in ours)
    assert truth.keys() - ours.keys() <= {"lm_head.weight"}
    theirs = load_file(saved / case / "merged" / "model.safetensors")  # verl merges only the base, without the adapter
    assert not torch.equal(
        theirs["model.layers.0.mlp.up_proj.weight"], ours["model.layers.0.mlp.up_proj.weight"].bfloat16()
    )
    kept = merge(folder, tmp_path / "kept", "--adapter", "keep")
    config = json.loads((kept / "adapter_config.json").read_text())
    of_verl = json.loads((saved / case / "merged" / "lora_adapter" / "adapter_config.json").read_text())
    assert {key: of_verl[key] for key in ("r", "lora_alpha", "peft_type", "task_type")}.items() <= config.items()
    assert set(config["target_modules"]) == set(of_verl["target_modules"])
    with (
        safe_open(kept / "adapter_model.safetensors", "pt") as mine,
        safe_open(saved / case / "merged" / "lora_adapter" / "adapter_model.safetensors", "pt") as other,
    ):
        assert set(mine.keys()) == set(other.keys())
        for name in other.keys():  # noqa: SIM118
            assert torch.equal(mine.get_tensor(name).bfloat16(), other.get_tensor(name))
