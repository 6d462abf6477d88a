"""Configurations for tests."""

from rlhf.config import Config


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
