"""An exported model has the tensor names of its base, and the base's dropouts, although training sets dropouts to 0."""

import json
from pathlib import Path

from safetensors.torch import load_file
from transformers import AutoConfig

from rlhf.errors import EXIT_DONE
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import equal_bits
from tests.support.forked_start import train_forked
from tests.support.launching import small
from tests.support.tiny_models import causal_lm

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.25}


def test_a_run_exports_the_names_and_dropouts_of_its_base(tmp_path, sums, command):
    causal_lm("gpt_neox", tmp_path / "base", **DROPOUT)
    settings = (f"model.path={tmp_path / 'base'}", "trainer.total_training_steps=1", "actor.optim.lr_warmup_steps=0")
    arguments = small(tmp_path / "runs", "exports", sums, *settings, "checkpoint.contents=[model,hf_model,extra]")
    done = train_forked(arguments)
    assert done.code == EXIT_DONE, done.output
    checkpoint = step_dir(tmp_path / "runs" / "rlhf" / "exports", 1)
    written = checkpoint / "actor" / "huggingface"
    stored = load_file(tmp_path / "base" / "model.safetensors")
    exported = load_file(written / "model.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {n: t.shape for n, t in stored.items()}
    assert dropouts(written) == dropouts(tmp_path / "base") == DROPOUT
    assert command("export", checkpoint, tmp_path / "exported")[0] == 0
    assert equal_bits(load_file(tmp_path / "exported" / "model.safetensors"), exported)
    assert json.loads((tmp_path / "exported" / "config.json").read_text()) == json.loads(
        (written / "config.json").read_text()
    )


def dropouts(folder: Path) -> dict[str, float]:
    config = AutoConfig.from_pretrained(folder)
    return {name: getattr(config, name) for name in DROPOUT}
