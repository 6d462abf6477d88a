"""Configuration that a checkpoint was saved with, against the present one. Imports no torch."""

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
"""The setting that names the weights beside which adapters are trained."""


def changes_since(path: Path, manifest: Manifest, config: ResolvedConfig) -> ConfigDiff:
    """Differences of `config` from what the checkpoint at `path` was saved with; none from an imported one.

    Raises DamagedCheckpoint when its bytes are not as committed.
    """
    # Reading a configuration takes longer than a small model.
    if manifest.imported or manifest.config_hash == config.hash:
        return ConfigDiff([], [])
    try:
        stored = CheckedFiles(path, manifest.files).content(CONFIG)
        return _by_content(config.compare(stored.decode(), manifest.release), manifest)
    except (DamagedCheckpoint, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise DamagedCheckpoint(f"{path} is damaged: {problem}") from None


def check_base(path: Path, manifest: Manifest, config: ResolvedConfig, diff: ConfigDiff, base: str) -> None:
    """Raise UserError when the checkpoint at `path` has adapters that were trained beside another base than the one
    whose fingerprint is `base`: no setting makes them fit it.

    `diff`: what `changes_since` returned.
    """
    stored = manifest.fingerprints.get(BASE)
    if stored in (None, base) or not config.setting("model.lora.enabled"):
        return
    present = config.setting(BASE)
    before = next((change.stored for change in diff.harmless if change.key == BASE), present)
    was = f"which was {before}" if before != present else "which had other files then"
    raise UserError(
        f"{BASE}={present} is another base than the one beside which the adapters in {path} were trained, {was}. "
        f"Restore that; or {NEW_RUN}."
    )


def _by_content(diff: ConfigDiff, manifest: Manifest) -> ConfigDiff:
    """The differences, where another path of the chat template is none if the same text is there."""

    def is_moved(change: Change) -> bool:
        known = manifest.fingerprints.get(change.key)
        if change.key != "model.chat_template" or known is None or change.present is None:
            return False
        return fingerprint_file(Path(change.present).expanduser()) == known

    return ConfigDiff(diff.harmless, [change for change in diff.trajectory if not is_moved(change)])
