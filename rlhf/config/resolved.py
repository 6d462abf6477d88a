"""The resolved configuration as a file: written by the supervisor, read by every rank, copied into every checkpoint."""

from pathlib import Path

from omegaconf import OmegaConf

from rlhf.config import Config


def to_yaml(config: Config) -> str:
    """The configuration as YAML, every value resolved."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def from_yaml(text: str) -> Config:
    """Rebuild the dataclasses from `to_yaml`'s text; a key that the schema lacks is an error."""
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    return config


def load(path: Path) -> Config:
    """Read a resolved configuration file."""
    return from_yaml(path.read_text())
