from dataclasses import fields
from typing import get_args

import pytest

from rlhf.config import Config
from rlhf.config.known_settings import SECTIONS, SETTINGS, setting_of
from rlhf.config.names.hints import nearest_setting
from rlhf.config.resolved import from_yaml, to_yaml
from rlhf.config.schema.fields import Resume
from rlhf.errors import nearest


def test_every_leaf_is_a_setting_with_rules():
    assert {f.name for f in fields(Config)} <= SECTIONS
    assert SETTINGS["actor.optim.lr"].metadata["gt"] == 0
    for setting in SETTINGS.values():
        assert setting.metadata["resume"] in get_args(Resume), setting.key


def test_value_reads_nested_settings():
    config = Config()
    config.actor.optim.lr = 0.5
    assert SETTINGS["actor.optim.lr"].value(config) == 0.5


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("trainer.nproc", "a whole number or null"),
        ("trainer.deterministic", "true or false or null"),
        ("actor.optim.betas", "a list such as [0.9, 0.95]"),
        ("checkpoint.load_contents", "a list such as [a, b] or null"),
        ("data.reasoning_gym.config", "a mapping such as {a: 1, b: 2}"),
    ],
)
def test_a_setting_describes_its_type_in_words(key, words):
    assert SETTINGS[key].expects == words


def test_free_mapping_owns_the_keys_below_it():
    owner = setting_of("data.reasoning_gym.config.min_terms")
    assert owner is not None
    assert owner.key == "data.reasoning_gym.config"
    assert setting_of("trainer.nproc.x") is None


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.nproq", "trainer.nproc"),
        ("trianer.nproc", "trainer.nproc"),
        ("lr", "actor.optim.lr"),
        ("actor_rollout_ref.actor.clip_ratio_high", "actor.clip_ratio_high"),
        ("modle", "model"),
        ("trainer.zzz", None),
    ],
)
def test_the_nearest_setting_of_a_misspelt_name_is_found(wrong, right):
    assert nearest_setting(wrong) == right


def test_the_nearest_word_of_a_list_is_found():
    assert nearest("wandbb", ["wandb", "tensorboard"]) == "wandb"
    assert nearest("xyz", ["wandb", "tensorboard"]) is None


def test_resolved_file_round_trip():
    config = Config()
    config.model.path = "org/name"
    config.data.reasoning_gym.config = {"min_terms": 2}
    config.actor.optim.lr = 3e-4
    assert from_yaml(to_yaml(config)) == config


def test_cached_yaml_conversion_does_not_share_state_with_configurations():
    """Both directions of the conversion are cached."""
    config = Config()
    config.model.path = "org/name"
    text = to_yaml(config)
    own = from_yaml(text)
    own.actor.optim.lr = config.actor.optim.lr = 3e-4
    own.actor.optim.betas.append(0.5)
    assert to_yaml(config) == text.replace("lr: 1.0e-06", "lr: 0.0003", 1) != text
    assert from_yaml(text).actor.optim.betas == config.actor.optim.betas
    assert from_yaml(text).actor.optim.lr == 1e-6
    # Equal values of different types give different texts.
    config.data.reasoning_gym.config = {"a": 1}
    whole = to_yaml(config)
    config.data.reasoning_gym.config = {"a": True}
    assert to_yaml(config) != whole


def test_from_yaml_does_not_keep_values_of_the_previous_text():
    """All texts are merged with the same schema."""
    own = from_yaml("actor: {optim: {betas: [0.5, 0.6]}}\nmodel: {path: org/a}")
    other = from_yaml("model: {path: org/b}")
    assert own.actor.optim.betas == [0.5, 0.6]
    assert (other.model.path, other.actor.optim.betas) == ("org/b", Config().actor.optim.betas)
