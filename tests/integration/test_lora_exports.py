"""Adapters for other tools: saved by two ranks, exported afterwards, and loaded by peft and transformers alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.export.finished_export import export_finished
from rlhf.config import Config
from rlhf.models.fingerprint import fingerprint
from rlhf.storage.layout import step_dir
from tests.support.adapted_engines import DORA, LORA, adapted_engine
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, run_ranks
from tests.support.engines import ENGINES, NEEDS_DEEPSPEED, logits_of, tokens, train
from tests.support.in_float64 import in_float64
from tests.support.rounding import sum_bound
from tests.support.tiny_updates import tiny_qwen2

pytestmark = NEEDS_DEEPSPEED

STEP = 2
SAVES = {"fsdp2": LORA, "zero3": LORA, "dora": DORA}


def config_of(folder: Path, kind: str, form: str) -> Config:
    config = make_config(folder / f"{kind}-{form}")
    config.backend, config.model.lora = ENGINES.get(kind, ENGINES["fsdp2"]), SAVES[kind]
    config.model.path = str(folder / "base")
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    config.checkpoint.hf_adapter, config.checkpoint.async_save = form, True
    return config


def work(rank: int, folder: Path) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    results: dict[str, Any] = {}
    known = {"model.path": fingerprint(folder / "base")}
    for kind, lora in SAVES.items():
        backend = adapted_engine(kind if kind in ENGINES else "fsdp2", lora=lora, base=folder / "base")
        train(backend, *range(STEP))
        for form in ("keep", "merge"):
            checkpointer = make_checkpointer(config_of(folder, kind, form), backend, STEP, fingerprints=known)
            checkpointer.save(STEP)
            checkpointer.finish()
        with torch.no_grad():
            logits = logits_of(backend, tokens(7))
        results[kind] = {"sent": {name: tensor.clone() for name, tensor in backend.full_tensors()}, "logits": logits}
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("exports")
    tiny_qwen2(0).save_pretrained(found / "base")
    return found


@pytest.fixture(scope="module")
def found(folder) -> dict[str, Any]:
    return run_ranks(2, work, folder, deadline_s=500, join=folder / "join")[0]


def saved(folder: Path, kind: str, form: str) -> Path:
    return step_dir(config_of(folder, kind, form).run_dir, STEP)


@torch.no_grad()
def logits_by_peft(folder: Path, base: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base).float(), folder).eval()
    return model(input_ids=tokens(7)).logits


@pytest.mark.parametrize("kind", SAVES)
def test_peft_loads_exported_adapters_with_the_logits_of_the_engine(kind, found, folder, tmp_path):
    in_run = saved(folder, kind, "keep") / "actor" / "huggingface"
    assert not (in_run / "config.json").exists()
    assert not (in_run / "model.safetensors").exists()
    assert main(["export", str(saved(folder, kind, "merge")), str(tmp_path / "out"), "--adapter", "keep"]) == 0
    weights = "adapter_model.safetensors"
    assert equal_bits(load_file(in_run / weights), load_file(tmp_path / "out" / weights))
    assert json.loads((in_run / "adapter_config.json").read_text()) == json.loads(
        (tmp_path / "out" / "adapter_config.json").read_text()
    )
    assert torch.equal(logits_by_peft(in_run, folder / "base"), found[kind]["logits"])


@pytest.mark.parametrize("kind", SAVES)
def test_the_merged_export_equals_the_synced_weights(kind, found, folder, tmp_path):
    in_run = saved(folder, kind, "merge") / "actor" / "huggingface"
    assert not (in_run / "adapter_config.json").exists()
    assert equal_bits(load_file(in_run / "model.safetensors"), found[kind]["sent"])
    source = str(saved(folder, kind, "keep"))
    assert main(["merge", "--local_dir", source, "--target_dir", str(tmp_path / "out"), "--adapter", "merge"]) == 0
    assert equal_bits(load_file(tmp_path / "out" / "model.safetensors"), found[kind]["sent"])
    with torch.no_grad(), in_float64():
        model = AutoModelForCausalLM.from_pretrained(in_run).double().eval()
        expected = logits_by_peft(saved(folder, kind, "keep") / "actor" / "huggingface", folder / "base")
        # The merged weights are rounded to float32: 7 matrices in each of two layers, in sums of at most 24 terms.
        apart = sum_bound(2 * 7 * 24) * float(expected.abs().max())
        torch.testing.assert_close(model(input_ids=tokens(7)).logits, expected, rtol=0, atol=apart)


def test_merging_is_peft_s_own(found, folder):
    keep = saved(folder, "fsdp2", "keep") / "actor" / "huggingface"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base").float(), keep)
    assert equal_bits(dict(model.merge_and_unload().named_parameters()), found["fsdp2"]["sent"])


def test_a_finished_run_is_exported_in_the_form_that_is_asked_for(found, folder):
    config = config_of(folder, "zero3", "keep")
    config.checkpoint.hf_adapter = "merge"
    export_finished(config.run_dir, config.checkpoint, STEP)
    written = config.run_dir / "huggingface" / "actor" / "model.safetensors"
    assert equal_bits(load_file(written), found["zero3"]["sent"])


def test_the_bare_base_is_never_exported(found, folder, tmp_path, capsys):
    source = saved(folder, "fsdp2", "keep")
    assert main(["export", str(source), str(tmp_path / "out")]) == 2
    assert "its base model alone is not what was trained. Set --adapter=merge" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(found, folder, tmp_path, capsys):
    other = shutil.copytree(folder / "base", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    command = ["export", str(saved(folder, "fsdp2", "keep")), str(tmp_path / "out"), "--adapter", "merge"]
    assert main([*command, "--hf_model_path", str(other)]) == 2
    assert "is no longer what" in capsys.readouterr().err
    moved = shutil.copytree(folder / "base", tmp_path / "moved")
    assert main([*command, "--hf_model_path", str(moved)]) == 0
    assert equal_bits(load_file(tmp_path / "out" / "model.safetensors"), found["fsdp2"]["sent"])


def test_a_test_of_the_merged_model_passes(found, folder, tmp_path):
    source = str(saved(folder, "fsdp2", "keep"))
    reference = str(saved(folder, "fsdp2", "merge") / "actor" / "huggingface")
    assert main(["test", "--local_dir", source, "--test_hf_dir", reference, "--adapter", "merge"]) == 0
    assert main(["test", "--local_dir", source, "--test_hf_dir", str(folder / "base"), "--adapter", "merge"]) == 1
