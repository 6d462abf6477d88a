"""config.json of models, checked against their role and the data's lengths before torch is imported."""

import json
import shutil
from pathlib import Path

import pytest
from transformers.models.auto import configuration_auto, modeling_auto

import rlhf
from rlhf.errors import UserError
from rlhf.models.config_check import (
    CAUSAL,
    CLASSIFIER,
    KNOWN,
    architectures,
    check_critic,
    check_policy,
    check_reward_model,
)
from tests.support.refusals import says, user_error

TINY = Path(rlhf.__file__).parent / "models" / "tiny_policy"


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def changed(folder: Path, **entries: object) -> str:
    """Replace entries of the folder's config.json, or remove them if None, and return the folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(folder)


def policy_error(name: str, trust_remote_code: bool = False, lengths: tuple[int, int] = (8, 8)) -> str:
    with pytest.raises(UserError) as raised:
        check_policy(name, trust_remote_code, *lengths)
    return str(raised.value)


@pytest.mark.parametrize(
    ("table", "module"), [(KNOWN, configuration_auto), (CAUSAL, modeling_auto), (CLASSIFIER, modeling_auto)]
)
def test_all_architectures_in_the_tables_of_transformers_are_read(table, module):
    assert architectures(table) >= set(getattr(module, table))
    assert len(architectures(table)) > 50


def test_a_quantized_policy(folder):
    name = changed(folder, quantization_config={"quant_method": "bitsandbytes"})
    assert policy_error(name).startswith(
        f"model.path={name}: is quantized (bitsandbytes), but a policy needs weights in"
    )


def test_the_bundled_policy_and_a_hub_name_pass():
    for name in (str(TINY), "org/name"):
        check_policy(name, False, 256, 256)
        check_critic(name, False)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"model_type": "vit"}, "model_type vit has no class that generates text from text (a causal LM) in the"),
        (
            {"model_type": "qwenn2"},
            "is not supported by the installed transformers. Did you mean qwen2? Update ",
        ),
        ({"model_type": None}, "config.json has no model_type"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}},
            "model_type mine is defined by code in the folder. If you trust the code, set "
            "model.trust_remote_code=true.",
        ),
    ],
)
def test_architectures_that_cannot_be_the_policy(folder, entries, expected):
    name = changed(folder, **entries)
    message = policy_error(name)
    assert message.startswith(f"model.path={name}: ")
    assert expected in message


def test_models_with_trusted_remote_code_are_not_checked(folder):
    check_policy(changed(folder, model_type="mine", auto_map={"AutoConfig": "a.B"}), True, 8, 8)


def test_a_critic_may_be_of_any_known_architecture(folder):
    check_critic(changed(folder, model_type="vit"), False)
    with pytest.raises(UserError, match=r"^critic\.path=.*: model_type nope is not supported"):
        check_critic(changed(folder, model_type="nope"), False)


@pytest.mark.parametrize(
    "entries",
    [
        {"max_position_embeddings": 100},
        {"max_position_embeddings": None, "n_positions": 100},
        {"max_position_embeddings": 10_000, "text_config": {"max_position_embeddings": 100}},
    ],
)
def test_lengths_beyond_the_positions(folder, entries):
    name = changed(folder, **entries)
    check_policy(name, False, 60, 40)
    assert policy_error(name, lengths=(60, 41)).startswith(
        "data.max_prompt_length=60 and data.max_response_length=41 need 101 positions, but the model has 100"
    )


@pytest.mark.parametrize(
    ("entries", "labels"),
    [
        ({}, 2),
        ({"num_labels": 1}, 1),
        ({"num_labels": 5}, 5),
        ({"id2label": {"0": "LABEL_0"}}, 1),
        ({"id2label": {"0": "NEGATIVE", "1": "POSITIVE"}}, 2),
        ({"text_config": {}}, 1),
    ],
)
def test_a_reward_model_has_one_label(folder, entries, labels):
    name = changed(folder, architectures=["LlamaForSequenceClassification"], **entries)
    if labels == 1:
        check_reward_model(name, False)
    else:
        with pytest.raises(UserError) as raised:
            check_reward_model(name, False)
        assert str(raised.value).startswith(
            f"reward_model.path={name} has {labels} labels, but a reward model needs one"
        )


def test_a_reward_model_does_not_write_text(folder):
    name = changed(folder, architectures=["LlamaForCausalLM"])
    says(user_error(check_reward_model, name, False), f"reward_model.path={name}", "LlamaForCausalLM", "writes text")


def test_a_reward_model_has_a_classifier(folder):
    with pytest.raises(UserError, match=r"model_type vit has no class that gives a text a score"):
        check_reward_model(changed(folder, model_type="vit", num_labels=1), False)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("tokens", ["x", 1.5, True, -1, 99_999_999, [99_999_999, -1], [1, "x"], {"id": 1}])
def test_tokens_that_cannot_end_a_response(folder, file, tokens):
    if file == "config.json":
        (folder / "generation_config.json").unlink()
        changed(folder, eos_token_id=tokens)
    else:
        (folder / file).write_text(json.dumps({"eos_token_id": tokens}))
    says(policy_error(str(folder)), f"model.path={folder}: {file}: eos_token_id={tokens!r}", "Correct it")


@pytest.mark.parametrize("tokens", [None, 0, [0, 1], []])
def test_tokens_that_can_end_a_response(folder, tokens):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
    check_policy(str(folder), False, 8, 8)
