"""Models of five architectures, trained on 2 ranks under each backend, saved, merged, and opened by transformers: the
logits are the trainer's, bit for bit. For qwen2 under ZeRO 3, they agree up to the rounding of its biases."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from rlhf.backends import build_backend
from rlhf.backends.training import Training
from rlhf.checkpoint.__main__ import main
from rlhf.config import Config
from rlhf.models import loading
from rlhf.models.fingerprint import fingerprint
from tests.support import tiny_models
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, run_ranks
from tests.support.engines import (
    CPU,
    ENGINES,
    NEEDS_DEEPSPEED,
    OPTIM,
    forward_bound,
    logits_of,
    state_of,
    tokens,
    train,
)

ARCHITECTURES = ["qwen2", "qwen3", "llama", "gemma", "mistral"]
# ZeRO 3 is last: it replaces torch's linear function in its process by a function that adds the bias separately.
KINDS = ["fsdp2", "fsdp2-bfloat16", "zero0", "zero1", "zero2", "zero2-bfloat16", "zero3", "zero3-bfloat16"]
DEADLINE_S = 400
STEPS = 2
# Architecture and engine.
Cell = tuple[str, str]


def cells_of(config: pytest.Config) -> list[Cell]:
    """Return every architecture with FSDP2 and every engine with one architecture, or all pairs."""
    if config.getoption("full_product"):
        return [(architecture, kind) for kind in KINDS for architecture in ARCHITECTURES]
    first = [(architecture, "fsdp2") for architecture in ARCHITECTURES]
    return first + [(ARCHITECTURES[n % 5], kind) for n, kind in enumerate(KINDS) if kind != "fsdp2"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", cells_of(metafunc.config), ids="-".join)


def config_of(folder: Path, architecture: str, kind: str, role: str = "actor") -> Config:
    config = make_config(folder / f"{architecture}-{kind}-{role}")
    config.model.path = str(folder / architecture)
    config.checkpoint.contents = ["model", "extra"]
    return config


def train_all(rank: int, folder: Path, cells: list[Cell]) -> dict[tuple[str, ...], tuple[dict[str, Tensor], Tensor]]:
    """Train and save each cell, and one critic. Return the weights and logits by cell."""
    done = {}
    for architecture, kind in [*cells, ("critic", "fsdp2")]:
        role = "critic" if architecture == "critic" else "actor"
        architecture = "llama" if role == "critic" else architecture
        config = config_of(folder, architecture, kind, role)
        source = loading.ModelSource("model.path", config.model.path)
        hf_config = loading.load_model_config(source, Path(source.path))
        load = loading.load_value_model if role == "critic" else loading.load_model
        model = load(loading.ModelStart(source, Path(source.path), hf_config))
        options: dict[str, Any] = {"grad_clip": 0.5, "total_optimizer_steps": 20}
        backend = build_backend(model, ENGINES[kind], CPU, Training(OPTIM, **options))
        if role == "critic":
            backend.backward(logits_of(backend, tokens(0)).sum())
            backend.optimizer_step()
        else:
            train(backend, *range(STEPS))
        with torch.no_grad():
            logits = logits_of(backend, tokens(9)).clone()
        prints = {"model.path": fingerprint(Path(source.path))}
        make_checkpointer(config, {role: backend}, STEPS, fingerprints=prints).save(STEPS)
        done[architecture, kind, role] = state_of(backend)["model"], logits
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("merge")
    for architecture in ARCHITECTURES:
        tiny_models.causal_lm(architecture, folder / architecture)
    cells = cells_of(request.config)
    first, second = run_ranks(2, train_all, folder, cells, deadline_s=DEADLINE_S, join=folder / "join")
    assert equal_bits(list(map(list, first.values())), list(map(list, second.values())))
    return folder, first


@NEEDS_DEEPSPEED
def test_the_merged_model_equals_the_trained_model(trained, cell, tmp_path):
    folder, done = trained
    weights, logits = done[*cell, "actor"]
    dtype = torch.bfloat16 if "bfloat16" in cell[1] else torch.float32
    target, config = tmp_path / "merged", config_of(folder, *cell)
    options = ["--dtype", "bfloat16"] if dtype == torch.bfloat16 else []
    assert main(["merge", "--local_dir", str(config.run_dir), "--target_dir", str(target), *options]) == 0
    model, found = AutoModelForCausalLM.from_pretrained(target, dtype="auto", output_loading_info=True)
    assert not any(found.values())
    assert model.dtype == dtype
    assert equal_bits(
        {name: p.detach() for name, p in model.named_parameters()}, {n: w.to(dtype) for n, w in weights.items()}
    )
    with torch.no_grad():
        here = model(input_ids=tokens(9), use_cache=False).logits
    if cell[0] == "qwen2" and "zero3" in cell[1]:  # the only architecture with a bias: see KINDS
        # In bfloat16, ZeRO 3 adds biases in a separate step, so it rounds q, k and v twice, in each of two layers.
        low = 2 * 3 * torch.finfo(torch.bfloat16).eps * float(logits.abs().max())
        apart = low if dtype == torch.bfloat16 else forward_bound(logits)
        torch.testing.assert_close(here, logits, rtol=0, atol=apart)
    else:
        assert equal_bits(here, logits)
    start = tiny_models.tiny_config(cell[0])
    written = json.loads((target / "config.json").read_text())
    assert (written["dtype"], written["architectures"]) == (str(dtype).removeprefix("torch."), [type(model).__name__])
    assert model.config.tie_word_embeddings == start.tie_word_embeddings
    base, merged = (AutoTokenizer.from_pretrained(path) for path in (folder / cell[0], target))
    talk = [{"role": "user", "content": "1 + 1"}]
    assert merged.apply_chat_template(talk, tokenize=False) == base.apply_chat_template(talk, tokenize=False)
    assert merged.get_vocab() == base.get_vocab()


@NEEDS_DEEPSPEED
def test_an_exported_critic_has_its_head(trained, tmp_path):
    folder, done = trained
    _, logits = done["llama", "fsdp2", "critic"]
    run_dir = config_of(folder, "llama", "fsdp2", "critic").run_dir
    assert main(["export", str(run_dir), str(tmp_path / "critic"), "--role", "critic"]) == 0
    model, found = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not any(found.values())
    assert model.config.architectures == ["LlamaForTokenClassification"]
    with torch.no_grad():
        assert equal_bits(model(input_ids=tokens(9)).logits, logits)
