"""Course of a run: hashes of what its steps follow from, for the rollout journal and for resumes."""

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

import rlhf
from rlhf.config import Config
from rlhf.config.known_settings import SETTINGS
from rlhf.config.user_functions import hash_of_files
from rlhf.models.fingerprint import fingerprint, fingerprint_file


def course_of(config: Config, run_id: str, fingerprints: Mapping[str, str]) -> str:
    """A hash of what makes the weights of a step what they are, but for the rewards and the number of ranks.

    Args:
        run_id: the run's identity.
        fingerprints: hashes of what settings only name: model files, prompts.
    """
    adapters = config.model.lora.path and Path(config.model.lora.path).expanduser()
    facts = {
        "rlhf": rlhf.__version__,
        "run_id": run_id,
        "settings": {s.key: s.value(config) for s in SETTINGS.values() if s.metadata["resume"] == "trajectory"},
        # What a resume leaves out (say, the optimizer's moments) changes the weights of every later step.
        "contents": sorted(config.checkpoint.load_contents or config.checkpoint.contents),
        "files": dict(fingerprints),
        # No resume asks for them, but a start that is repeated before the first save may be from others.
        "adapters": fingerprint(adapters) if adapters and adapters.is_dir() else None,
        "functions": hash_of_files([config.algorithm.adv_estimator, config.actor.policy_loss.loss_mode]),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def user_files(config: Config) -> dict[str, str]:
    """A hash of each file of the user's that a setting names, by setting: functions, and the chat template.

    What is in them changes the run as the settings do; what functions import is not looked at.
    """
    named = {
        "reward.functions": config.reward.functions,
        "algorithm.adv_estimator": [config.algorithm.adv_estimator],
        "actor.policy_loss.loss_mode": [config.actor.policy_loss.loss_mode],
    }
    hashes = {key: hash_of_files(names) for key, names in named.items() if any(".py:" in name for name in names)}
    if (template := config.model.chat_template) is not None:
        hashes["model.chat_template"] = fingerprint_file(Path(template).expanduser())
    return hashes
