"""Hashes the settings and files that determine a run's steps, for the rollout journal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

import rlhf
from rlhf.config import CheckpointConfig, LoraConfig
from rlhf.config.agent_command import files_of
from rlhf.config.user_functions import hash_of_files
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
        "functions": hash_of_files(
            [settings[key] for key in ("algorithm.adv_estimator", "actor.policy_loss.loss_mode")]
            + settings["env.classes"]
            + files_of(settings["env.command"])
        ),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
