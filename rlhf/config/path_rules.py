"""Rules of the settings that name files: homes that exist, and starts that no overwriting deletes."""

import os
from collections.abc import Iterator
from pathlib import Path

from rlhf.config import Config
from rlhf.config.same_files import PATHS
from rlhf.config.schema import SETTINGS

STARTS = ("model.path", "model.lora.path", "critic.path", "reward_model.path")
"""Settings that name what a run begins with."""


def homeless_paths(config: Config) -> Iterator[str]:
    """Paths that begin with the home of a user who has none here, one line each: nothing can look for them."""
    for key in (*PATHS, "model.lora.path", "trainer.resume_from_path"):
        value = SETTINGS[key].value(config)
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name.startswith("~") and os.path.expanduser(name).startswith("~"):  # noqa: PTH111
                yield f"{key}={name}: there is no user {name.split('/')[0]!r} here; write the path without ~."


def overwritten_starts(config: Config) -> Iterator[str]:
    """Starts in the run directory that `trainer.overwrite` would empty first, one line each."""
    for key in STARTS if config.trainer.overwrite else ():
        name = SETTINGS[key].value(config)
        start = None if not name else Path(name).expanduser().resolve()
        if start is not None and start.is_dir() and start.is_relative_to(config.run_dir.resolve()):
            yield (
                f"trainer.overwrite=true: would delete {key}={name}, which is in the run directory; set "
                "trainer.overwrite=false, and a new trainer.experiment_name for a new run."
            )
