"""Configuration that a checkpoint was saved with, against the present one. Imports no torch."""

from pathlib import Path

import yaml

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.config.compare import ConfigDiff, ResolvedConfig
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import CONFIG
from rlhf.storage.reading import CheckedFiles


def changes_since(path: Path, manifest: Manifest, config: ResolvedConfig) -> ConfigDiff:
    """Differences of `config` from what the checkpoint at `path` was saved with; none from an imported one.

    Raises DamagedCheckpoint when its bytes are not as committed.
    """
    # Reading a configuration takes longer than a small model.
    if manifest.imported or manifest.config_hash == config.hash:
        return ConfigDiff([], [])
    try:
        stored = CheckedFiles(path, manifest.files).content(CONFIG)
        return config.compare(stored.decode())
    except (DamagedCheckpoint, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise DamagedCheckpoint(f"{path} is damaged: {problem}") from None
