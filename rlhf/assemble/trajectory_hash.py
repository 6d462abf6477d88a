"""Hashes the settings and files that determine a run's steps, for the rollout journal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

import rlhf
from rlhf.checkpoint.commit.user_files import USER_FILES, hash_of_value
from rlhf.config import CheckpointConfig, LoraConfig
from rlhf.models.fingerprint import fingerprint


def trajectory_hash(
    settings: Mapping[str, Any],
    checkpoint: CheckpointConfig,
    lora: LoraConfig,
    run_id: str,
    fingerprints: Mapping[str, str],
) -> str:
    """Return a hash of everything that determines a step's weights, except the code of rewards and the number of ranks.

    Args:
        settings: settings that determine the run's results (`rlhf.config.compare.trajectory`).
        fingerprints: hashes of the model files and the prompts.
    """
    adapters = lora.path and Path(lora.path).expanduser()
    facts = {
        "rlhf": rlhf.__version__,
        "run_id": run_id,
        "settings": dict(settings),
        # A resume without some contents, such as the optimizer's moments, changes all later weights.
        "contents": sorted(checkpoint.load_contents or checkpoint.contents),
        "files": dict(fingerprints),
        # A resume reads the adapters of its checkpoint; only a start without checkpoints reads this folder.
        "adapters": fingerprint(adapters) if adapters and adapters.is_dir() else None,
        # Chat templates count with their content, too: they render the messages between turns. An edit after a kill
        # before the first checkpoint once trained old turns after new prompts.
        "user_files": {key: hash_of_value(key, settings[key]) for key in USER_FILES if key != "reward.functions"},
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
