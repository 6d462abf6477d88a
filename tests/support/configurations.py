"""Makes configurations for tests."""

import pytest

from rlhf.config import Config
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError


def make(**changes) -> Config:
    """Return a valid configuration with changed settings: make(trainer__nproc=2)."""
    config = Config()
    config.model.path = "org/name"
    for key, value in changes.items():
        *parents, name = key.split("__")
        section = config
        for parent in parents:
            section = getattr(section, parent)
        setattr(section, name, value)
    return config


def problems(config: Config, environ: dict[str, str] | None = None) -> list[str]:
    """Return the errors of a configuration, one per line."""
    with pytest.raises(UserError) as caught:
        validate(config, environ or {})
    return str(caught.value).splitlines()
