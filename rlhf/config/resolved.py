"""The resolved configuration as a file: written by the supervisor, read by every rank, copied into every checkpoint."""

from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from rlhf.config import Config
from rlhf.config.migrations import Lost, migrate

# Either way takes as long as a small save, and one process asks for nearly the same again and again: at each step of a
# start, and for every checkpoint that it looks at.
_KEPT = 256


@dataclass(frozen=True)
class _Shown:
    """A section as it was when it was shown, since it may change."""

    text: str
    section: Any = field(compare=False)


def to_yaml(config: Config) -> str:
    """The configuration as YAML, every value resolved."""
    sections = {part.name: getattr(config, part.name) for part in fields(config)}
    return "".join(_to_yaml(name, _Shown(repr(section), section)) for name, section in sections.items())


@lru_cache(_KEPT)
def _to_yaml(name: str, shown: _Shown) -> str:
    return OmegaConf.to_yaml(OmegaConf.create({name: shown.section}), resolve=True)


def from_yaml(text: str) -> Config:
    """Rebuild the dataclasses from `to_yaml`'s text of this release; a key that the schema lacks is an error."""
    return deepcopy(_parsed(text))


@lru_cache(_KEPT)
def _parsed(text: str) -> Config:
    return _typed(OmegaConf.create(text))


def from_stored(text: str, release: str | None) -> tuple[Config, list[Lost]]:
    """Rebuild the dataclasses from `to_yaml`'s text of any `release` (None if unknown), with the values that have no
    place in them. Raises OmegaConfBaseException for a key that neither the schema nor a migration knows."""
    config, lost = _migrated(text, release)
    return deepcopy(config), lost


@lru_cache(_KEPT)
def _migrated(text: str, release: str | None) -> tuple[Config, list[Lost]]:
    tree = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(tree, dict)
    migrated = migrate(cast(dict[str, Any], tree), release)
    return _typed(OmegaConf.create(migrated.tree)), migrated.lost


def _typed(tree: Any) -> Config:
    config = OmegaConf.to_object(OmegaConf.merge(schema(), tree))
    assert isinstance(config, Config)
    return config


@cache
def schema() -> DictConfig:
    """The schema that texts are laid over, made once in a process."""
    return OmegaConf.structured(Config)


def load(path: Path) -> Config:
    """Read a resolved configuration file."""
    return from_yaml(path.read_text())
