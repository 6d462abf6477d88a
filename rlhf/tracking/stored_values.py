"""Reads the settings of a run from its directory, as dotted names, for readers that compare runs."""

import json
from functools import reduce
from pathlib import Path
from typing import Any

from rlhf.config.known_settings import SETTINGS
from rlhf.config.secrets import masked
from rlhf.config.stored import stored_sections
from rlhf.errors import UserError
from rlhf.storage.layout import RESOLVED


def stored_values(run_dir: Path) -> dict[str, Any]:
    """Return the value of each setting, without secrets; None for a setting that the run's release did not have.

    Raises:
        UserError: the stored configuration is missing or damaged.
    """

    def child(tree: Any, name: str) -> Any:
        return tree.get(name) if isinstance(tree, dict) else None

    try:
        sections = stored_sections((run_dir / RESOLVED).read_text())
        settings = {key: masked(reduce(child, key.split("."), sections)) for key in SETTINGS}
        json.dumps(settings)  # raises TypeError for a date: valid YAML, but no setting's type
    except (TypeError, ValueError, OSError) as error:
        raise UserError(f"{run_dir / RESOLVED} is damaged ({error}). Restore the file from a copy.") from None
    return settings
