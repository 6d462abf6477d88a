"""Compares the configuration stored in a checkpoint with the present one. Imports no torch."""

from pathlib import Path

import yaml

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.config.compare import NEW_RUN, Change, ConfigDiff, ResolvedConfig
from rlhf.errors import UserError
from rlhf.models.fingerprint import fingerprint_file
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import CONFIG
from rlhf.storage.reading import CheckedFiles

BASE = "model.path"
"""The setting that names the base model of adapters."""
CODE = "model.trust_remote_code"
"""A manifest's `fingerprints` have the hash of the models' Python files under this key."""


def changes_since(path: Path, manifest: Manifest, config: ResolvedConfig) -> ConfigDiff:
    """Return the changes of `config` since the checkpoint at `path`; raise DamagedCheckpoint if its
    configuration is damaged."""
    # Skip equal texts by their hash: parsing a configuration takes longer than loading a small model.
    if manifest.imported or manifest.config_hash == config.hash:
        return ConfigDiff([], [])
    try:
        stored = CheckedFiles(path, manifest.files).content(CONFIG)
        return _by_content(config.compare(stored.decode(), manifest.release), manifest)
    except (DamagedCheckpoint, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise DamagedCheckpoint(f"{path} is damaged: {problem}") from None


def check_base(path: Path, manifest: Manifest, config: ResolvedConfig, diff: ConfigDiff, base: str) -> None:
    """Raise UserError unless the base model of the checkpoint's adapters has the fingerprint `base`. Adapters fit no
    other base, so `trainer.allow_config_change` does not help. `diff`: the result of `changes_since`."""
    stored = manifest.fingerprints.get(BASE)
    if stored in (None, base) or not config.setting("model.lora.enabled"):
        return
    present = config.setting(BASE)
    before = next((change.stored for change in diff.harmless if change.key == BASE), present)
    was, remedy = f"Their base model was {before}", f"Set {BASE}={before}"
    if before == present:
        was, remedy = "The model had other files at the save", "Restore the files"
    raise UserError(f"{BASE}={present} is not the base model of the adapters in {path}. {was}. {remedy}; or {NEW_RUN}.")


def _by_content(diff: ConfigDiff, manifest: Manifest) -> ConfigDiff:
    """Drop the change of `model.chat_template` if only the file's path differs, not its content."""

    def is_moved(change: Change) -> bool:
        known = manifest.fingerprints.get(change.key)
        if change.key != "model.chat_template" or known is None or change.present is None:
            return False
        return fingerprint_file(Path(change.present).expanduser()) == known

    return ConfigDiff(diff.harmless, [change for change in diff.trajectory if not is_moved(change)])
