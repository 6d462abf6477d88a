"""Loading of models, and errors of a broken folder, which name the setting with the folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils.logging import get_verbosity

from rlhf.assemble.model_sources import model_source
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.models import tiny
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
from rlhf.rollout.embedded import eos_token_ids
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
def test_missing_or_misshapen_weights_are_an_error(tmp_path, kind, tensor):
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
def test_dropout_is_0_in_training_and_kept_in_the_export(tmp_path, load):
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


@pytest.fixture
def policy(tmp_path) -> Path:
    return shutil.copytree(Path(tiny.__file__).parent / "tiny_policy", tmp_path / "policy")


@pytest.mark.parametrize("content", ["version https://git-lfs.github.com/spec/v1\n", '{"eos_token_id": [1', "[1]"])
def test_a_damaged_generation_config_is_not_ignored(policy, content):
    """transformers would use the end-of-sequence tokens in config.json instead."""
    source = ModelSource("model.path", str(policy))
    (policy / "generation_config.json").write_text(content)
    says(user_error(load_model_config, source, policy), f"model.path={policy} has no usable generation_config.json")
    (policy / "generation_config.json").unlink()
    config = load_model_config(source, policy)
    tensors = load_file(policy / "model.safetensors")
    for model in (load_model(ModelStart(source, policy, config), each) for each in (None, tensors)):
        assert model.generation_config.eos_token_id == json.loads((policy / "config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize(
    ("name", "content", "function"),
    [
        ("tokenizer.json", "{}", load_tokenizer),
        ("tokenizer_config.json", "[1]", load_tokenizer),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}', load_model_config),
        ("config.json", '{"model_type": "llama", "vocab_size": "x"}', load_model_config),
    ],
)
def test_damaged_model_files_are_user_errors(policy, name, content, function):
    (policy / name).write_text(content)
    says(
        user_error(function, ModelSource("model.path", str(policy)), policy),
        f"model.path={policy} has no usable",
        "Restore",
    )


def test_errors_of_the_models_own_code_propagate(policy):
    """Without a damaged file, the traceback shows the bug in the folder's code."""
    (policy / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (policy / "own.py").write_text("raise KeyError('bug')")
    with pytest.raises(KeyError, match="bug"):
        load_model_config(ModelSource("model.path", str(policy), trust_remote_code=True), policy)


@pytest.mark.parametrize("tokens", ["x", [10**8], -1])
def test_the_rollout_rejects_impossible_tokens_of_a_name_of_the_hub(policy, tokens):
    source = ModelSource("model.path", str(policy))
    model = load_model(ModelStart(source, policy, load_model_config(source, policy)))
    model.generation_config.eos_token_id = tokens
    says(user_error(eos_token_ids, model, load_tokenizer(source, policy)), "model.path", "eos_token_id", "Correct it")
