"""Loading of models, and errors of a broken folder, which name the setting with the folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils.logging import get_verbosity

from rlhf.assemble.model_sources import model_source
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.models.hub_names import check_name
from rlhf.models.loading import (
    ModelSource,
    ModelStart,
    hf_files,
    load_model,
    load_model_config,
    load_reward_model,
    load_tokenizer,
    load_value_model,
    resolve_path,
)
from tests.support.refusals import says, user_error
from tests.support.tiny_models import causal_lm, classifier, tiny_tokenizer


def config() -> Config:
    c = Config()
    c.model.path, c.model.revision, c.model.trust_remote_code = "org/policy", "v1", True
    c.model.attn_implementation, c.model.chat_template = "eager", "chat.jinja"
    return c


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """The folder of org/name in the Hub's cache, which has its small files and pickled weights."""
    cached = tmp_path / "models--org--name"
    for file in ("refs/main", "snapshots/abc/config.json", "snapshots/abc/pytorch_model.bin"):
        (cached / file).parent.mkdir(parents=True, exist_ok=True)
        (cached / file).write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cached


def test_a_name_of_the_hub_is_looked_for_in_the_cache_first(hub_cache, monkeypatch):
    says(user_error(check_name, "model.path", "org/other", None), "model.path=org/other", "HF_HUB_OFFLINE", "Unset")
    with pytest.raises(UserError, match=r"^model\.path=a/b/c is neither a folder nor a Hub name of the form org/name"):
        check_name("model.path", "a/b/c", None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    check_name("model.path", "org/name", None)
    check_name("model.path", str(hub_cache), None)


@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_model_without_safetensors_has_a_remedy(hub_cache, weights):
    source = ModelSource("model.path", "org/name")
    if not weights:
        assert resolve_path(source, weights=False) == hub_cache / "snapshots" / "abc"
        return
    with pytest.raises(UserError, match=r"^model\.path=org/name: the Hub has no safetensors of this model"):
        resolve_path(source)


def test_sources_of_the_three_models():
    c = config()
    policy = model_source("model.path", "org/policy", "v1", c.model, c.model.chat_template)
    assert policy == ModelSource("model.path", "org/policy", "v1", True, "eager", "chat.jinja")
    critic = model_source("critic.path", "org/critic", None, c.model)
    assert critic == ModelSource("critic.path", "org/critic", None, True, "eager")
    judge = model_source("reward_model.path", "org/judge", "v2", c.model)
    assert judge == ModelSource("reward_model.path", "org/judge", "v2", True, "eager")


@pytest.mark.parametrize("setting", ["model.path", "critic.path", "reward_model.path"])
def test_messages_begin_with_the_setting(tmp_path, setting):
    source = ModelSource(setting, str(tmp_path))
    for function in (load_tokenizer, load_model_config):
        with pytest.raises(UserError) as caught:
            function(source, tmp_path)
        assert str(caught.value).startswith(f"{setting}={tmp_path} has no usable")
    with pytest.raises(UserError, match=f"^{setting}=a/b/c is neither a folder nor a Hub name"):
        resolve_path(ModelSource(setting, "a/b/c"))


def damage(folder, name, tensor=None):
    """Take the weight `name` out of `folder`, or put `tensor` in its place."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    tensors |= {} if tensor is None else {name: tensor}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("tensor", [None, torch.zeros(3, 3)])
@pytest.mark.parametrize("kind", ["policy", "reward_model"])
def test_lost_or_misshapen_weights_are_told(tmp_path, kind, tensor):
    make, load = {"policy": (causal_lm, load_model), "reward_model": (classifier, load_reward_model)}[kind]
    make("llama", tmp_path)
    lost = "model.layers.1.mlp.up_proj.weight"
    damage(tmp_path, lost, tensor)
    source, before = ModelSource("reward_model.path", str(tmp_path)), get_verbosity()
    with pytest.raises(UserError, match=f"^reward_model.path={tmp_path}: 1 weights .*such as {lost}"):
        load(ModelStart(source, tmp_path, load_model_config(source, tmp_path)))
    assert get_verbosity() == before


def test_reward_model_without_its_head_is_refused(tmp_path):
    classifier("llama", tmp_path)
    damage(tmp_path, "score.weight")
    source = ModelSource("reward_model.path", str(tmp_path))
    with pytest.raises(UserError, match=r"1 weights .*such as score\.weight"):
        load_reward_model(ModelStart(source, tmp_path, load_model_config(source, tmp_path)))


def test_policy_as_reward_model_is_refused(tmp_path):
    causal_lm("llama", tmp_path)
    source = ModelSource("reward_model.path", str(tmp_path))
    with pytest.raises(UserError, match="has 2 labels, but a reward model needs one"):
        load_reward_model(ModelStart(source, tmp_path, load_model_config(source, tmp_path)))


def test_architecture_without_a_classifier_is_refused(tmp_path):
    causal_lm("granite", tmp_path)
    source = ModelSource("reward_model.path", str(tmp_path))
    with pytest.raises(UserError, match="granite has no sequence classifier in transformers"):
        load_reward_model(ModelStart(source, tmp_path, load_model_config(source, tmp_path)))


@pytest.mark.parametrize("load", [load_model, load_value_model])
def test_training_is_without_the_dropout_that_is_exported(tmp_path, load):
    causal_lm("gpt_neox", tmp_path, hidden_dropout=0.1, attention_dropout=0.25)
    source = ModelSource("model.path", str(tmp_path))
    base = load_model_config(source, tmp_path)
    model = load(ModelStart(source, tmp_path, base))
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    assert model.config.attention_dropout == 0
    files = hf_files(model.config, tiny_tokenizer(), None, base)
    (tmp_path / "config.json").write_bytes(files["config.json"])
    written = load_model_config(source, tmp_path)
    assert (written.hidden_dropout, written.attention_dropout) == (0.1, 0.25)
    assert model.config.hidden_dropout == 0


def test_reward_model_is_frozen_and_without_dropout(tmp_path):
    classifier("gpt2", tmp_path, resid_pdrop=0.5)
    source = ModelSource("reward_model.path", str(tmp_path))
    model = load_reward_model(ModelStart(source, tmp_path, load_model_config(source, tmp_path)))
    assert not model.training
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.float32, False)}
