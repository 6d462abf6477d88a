"""Configurations for tests."""

import pytest

from rlhf.config import Config
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError


def make(**changes) -> Config:
    """A valid configuration with some settings changed: make(trainer__nproc=2)."""
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
    """The lines with which a configuration is refused."""
    with pytest.raises(UserError) as caught:
        validate(config, environ or {})
    return str(caught.value).splitlines()
