import shlex

import pytest

from rlhf.compose import compose_config
from rlhf.config.compare import compare
from rlhf.config.library import Library
from rlhf.config.overrides import as_shell, command_of, publishable, stored_settings
from rlhf.config.resolved import to_yaml

LIBRARY = Library.find(None)
COMMANDS = {
    "default": [],
    "dapo": ["recipes=dapo_math"],
    "gsm8k": ["recipes=gsm8k_qwen_0.5b", "trainer.nproc=2", "actor.optim.lr=3e-7"],
    "ppo": ["recipes=offline", "algorithm=ppo", "backend=deepspeed", "rollout=vllm"],
    "words": [
        "recipes=minimal",
        "model.path=org/name",
        "data.train_files=[a.jsonl,'b c.jsonl']",
        "rollout.stop=['</a>','\"q\"','it''s','end\\\\']".replace("''", "\\'"),
        "rollout.engine_kwargs.vllm={kv_cache_dtype: fp8, max_num_batched_tokens: 8192}",
        "data.prompt_key='true'",
        "reward.weights=[0.5]",
    ],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_shown_command_composes_the_same_configuration(command):
    config = compose_config(command, LIBRARY)
    shell = as_shell(command_of(stored_settings(to_yaml(config))))
    python, module, name, *arguments = shlex.split(shell.replace("\\\n", ""))
    assert (python, module, name) == ("python", "-m", "rlhf.train")
    again = compose_config(arguments, LIBRARY)
    assert compare(config, again).trajectory == []
    assert again.model.path == config.model.path


def test_the_shown_command_has_only_settings_that_differ_from_defaults():
    config = compose_config(["recipes=minimal", "model.path=org/name", "data.train_files=x.jsonl"], LIBRARY)
    command = command_of(stored_settings(to_yaml(config)))
    assert "model.path=org/name" in command
    assert not any(part.startswith(("trainer.default_local_dir", "algorithm.", "checkpoint.")) for part in command)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/models/Qwen", "Qwen"),
        ("~/rewards.py:score", "rewards.py:score"),
        ("file:///data/x.jsonl", "x.jsonl"),
        ("data/gsm8k.jsonl", "data/gsm8k.jsonl"),
        ("org/name", "org/name"),
        ("https://me:pass@host/set?token=1", "https://host/set"),
        ("s3://bucket/a", "s3://bucket/a"),
        (["/a/b", 3, None], ["b", 3, None]),
        ({"api_key": "x", "hf-token": 3, "max_tokens": 5, "deep": {"password": "y"}}, None),
        ("say hf_abcdefghijklmnopqrst now", "say REDACTED now"),
    ],
)
def test_paths_and_secrets_are_removed_from_publishable_values(value, shown):
    redacted = {"api_key": "REDACTED", "hf-token": "REDACTED", "max_tokens": 5, "deep": {"password": "REDACTED"}}
    assert publishable(value) == (redacted if shown is None else shown)


def test_invalid_stored_settings_are_an_error():
    for text in ("[" * 1500, "a: [", "\t"):
        with pytest.raises(ValueError, match="not valid YAML"):
            stored_settings(text)
    added = stored_settings("{}")  # the settings that releases added, with the values of the old behavior
    assert stored_settings("actor: 3") == stored_settings("old: {name: 1}") == added
    assert not [key for key in added if key.startswith(("actor", "old"))]
