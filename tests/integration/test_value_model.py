"""A value head on any causal LM: its initial values, the weights that it keeps, and its export to other tools."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from rlhf.backends.fsdp2 import shard
from rlhf.config import BackendConfig
from rlhf.errors import UserError
from rlhf.models.loading import ModelSource, ModelStart, hf_files, load_model_config, load_value_model
from tests.support.checkpoints import equal_bits
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import run_ranks
from tests.support.tiny_models import CAUSAL, causal_lm, classifier, tiny_tokenizer

OURS = ("olmo2", "gemma3_text", "granite", "opt")
IDS = torch.arange(1, 25).view(2, 12)


def load(folder: Path) -> PreTrainedModel:
    source = ModelSource("critic.path", str(folder))
    return load_value_model(ModelStart(source, folder, load_model_config(source, folder)))


def head_of(model: PreTrainedModel) -> torch.nn.Linear:
    return next(m for m in model.children() if isinstance(m, torch.nn.Linear))


def values(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(5)
    for parameter in head_of(model).parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("architecture", CAUSAL)
def test_values_are_the_trunk_under_a_head_that_starts_at_zero(tmp_path, architecture, caplog):
    causal = causal_lm(architecture, tmp_path)
    logging.getLogger("transformers").addHandler(caplog.handler)  # transformers' loggers don't propagate
    try:
        model = load(tmp_path)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.records
    assert torch.equal(values(model), torch.zeros(2, 12, 1))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    # In train mode, too, each value is the causal LM's last hidden state under the head.
    head = head_of(randomised(model.train()))
    hidden = causal.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    assert torch.equal(values(model), head(hidden))


@pytest.mark.parametrize("architecture", CAUSAL)
def test_exported_critic_gives_the_same_values(tmp_path, architecture):
    causal_lm(architecture, tmp_path / "policy")
    model = randomised(load(tmp_path / "policy"))
    export = tmp_path / "critic"
    export.mkdir()
    for name, content in hf_files(model.config, tiny_tokenizer(), None).items():
        (export / name).write_bytes(content)
    persistent = model.state_dict().keys()
    tensors = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in persistent}
    save_file({n: t.detach().clone() for n, t in tensors.items()}, export / "model.safetensors", {"format": "pt"})
    assert json.loads((export / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert torch.equal(values(load(export)), values(model))
    if architecture not in OURS:
        opened, found = AutoModelForTokenClassification.from_pretrained(export, output_loading_info=True)
        assert not any(found.values())
        assert torch.equal(values(opened.eval()), values(model))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
def test_reward_model_s_head_is_kept(tmp_path, architecture):
    scorer = classifier(architecture, tmp_path)
    model = load(tmp_path)
    assert torch.equal(head_of(model).weight, scorer.score.weight)
    last = scorer(input_ids=IDS).logits
    assert torch.equal(values(model)[:, -1], last)
    if head_of(model).bias is not None:
        assert torch.equal(head_of(model).bias, torch.zeros(1))


def test_head_of_several_labels_is_refused(tmp_path):
    classifier("llama", tmp_path, num_labels=3)
    with pytest.raises(UserError, match=r"its head has 3 labels \(score\.weight\), but a critic needs one"):
        load(tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "olmo2"])
def test_missing_trunk_weights_are_told(tmp_path, architecture):
    causal_lm(architecture, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if ".1." in name)
    save_file({name: t for name, t in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"critic\.path=.*1 weights .*such as {lost}"):
        load(tmp_path)


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UserError, match=r"critic\.path=.*\(t5\) cannot have a value head. Set a causal LM"):
        load(tmp_path)


def test_configuration_of_the_policy_is_left_alone(tmp_path):
    causal_lm("llama", tmp_path)
    source = ModelSource("model.path", str(tmp_path))
    hf_config = load_model_config(source, tmp_path)
    before = hf_config.to_dict()
    load_value_model(ModelStart(source, tmp_path, hf_config))
    assert hf_config.to_dict() == before


def loss_and_gradients(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (values(model) - 1).square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "olmo2"])
def test_gradient_checkpointing_changes_no_gradient(tmp_path, architecture):
    causal_lm(architecture, tmp_path)
    results = []
    for enabled in (False, True):
        model = randomised(load(tmp_path)).train()
        if enabled:
            # The worker enables it in the same way for the policy.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
                {"use_reentrant": False}
            )
            assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        results.append(loss_and_gradients(model))
    assert torch.equal(results[0][0], results[1][0])
    assert equal_bits(results[0][1], results[1][1])


SHARDED = ("qwen2", "gpt2", "olmo2")


@in_float64()
def on_rank(folder: Path) -> list[float]:
    """Return the largest difference of each model's loss and gradients under FSDP2 from the whole model's."""
    result = []
    for architecture in SHARDED:
        whole = randomised(load(folder / architecture).double())
        # A head of one value has one row, so the last rank holds none of it.
        model = shard(randomised(load(folder / architecture).double()), BackendConfig(), torch.device("cpu"))
        assert sum(type(m).__name__.startswith("FSDP") for m in model.modules()) == 3  # two layers and the rest
        assert all(isinstance(p, DTensor) for p in model.parameters())
        loss, gradients = loss_and_gradients(model)
        expected_loss, expected = loss_and_gradients(whole)
        assert gradients.keys() == expected.keys()
        far = max(float((gradients[name].full_tensor() - expected[name]).abs().max()) for name in expected)
        result.append(max(abs(float(loss - expected_loss)), far))
    return result


def test_sharded_over_two_ranks_it_is_the_same_model(tmp_path):
    for architecture in SHARDED:
        causal_lm(architecture, tmp_path / architecture)
    for result in run_ranks(2, partial(on_rank, tmp_path)):
        assert max(result) < TOLERANCE
