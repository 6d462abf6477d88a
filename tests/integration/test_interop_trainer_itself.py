"""Checkpoints that transformers' Trainer saves, and adapters that peft saves: we merge and read them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.checkpoint.__main__ import main
from rlhf.convert.layouts import open_source
from rlhf.models.hf.source import Origin
from tests.support.peers import run_in_peers
from tests.support.tiny_models import causal_lm

pytestmark = pytest.mark.peers
SCRIPT = Path(__file__).parents[1] / "support" / "trainer_saves.py"
WHOLE = ("qwen2/full", "llama/full")
ADAPTED = ("llama/lora", "llama/patterns", "gpt2/conv1d")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("trainer")
    for architecture in ("llama", "qwen2", "gpt2"):
        causal_lm(architecture, root / "models" / architecture)
    run_in_peers(SCRIPT, root / "models", root, *WHOLE, *ADAPTED)
    return root


def truth_of(saved: Path, case: str) -> dict[str, dict]:
    return torch.load(saved / case / "truth.pt", weights_only=True)


@pytest.mark.parametrize("case", WHOLE)
def test_weights_moments_step_and_schedule(case, saved):
    source = open_source(Origin(saved / case / "checkpoint-2"))
    assert source.layout == "trainer"
    truth = truth_of(saved, case)
    expected = {f"{name}.{key}": value for name, state in truth["moments"].items() for key, value in state.items()}
    assert source.contents.moments.keys() == expected.keys()
    tied = {"lm_head.weight"} if case.startswith("qwen2") else set()
    assert source.contents.tensors.keys() == truth["tensors"].keys() - tied
    for name, info in (source.contents.tensors | source.contents.moments).items():
        tensor = expected[name] if name in expected else truth["tensors"][name]
        assert torch.equal(source.read(name, 0, info.numel), tensor.reshape(-1)), name
    progress = source.contents.progress
    assert progress.step == progress.optimizer_steps == 2
    assert progress.schedule is not None
    assert progress.schedule["last_epoch"] == 2


@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_are_merged_as_peft_merges_them(case, saved, tmp_path):
    folder = str(saved / case / "checkpoint-2")
    target = tmp_path / "merged"
    assert main(["merge", "--local_dir", folder, "--target_dir", str(target), "--adapter", "merge"]) == 0
    ours, truth = load_file(target / "model.safetensors"), truth_of(saved, case)["tensors"]
    assert truth.keys() - ours.keys() <= {"lm_head.weight"}
    assert ours.keys() <= truth.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, truth[name]), name
    kept = tmp_path / "kept"
    assert main(["merge", "--local_dir", folder, "--target_dir", str(kept), "--adapter", "keep"]) == 0
    before, after = (load_file(f"{path}/adapter_model.safetensors") for path in (folder, kept))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
