"""Converts the resolved configuration to and from YAML, for ranks and checkpoints."""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from rlhf.config import Config
from rlhf.config.migrations import Lost, migrate
from rlhf.config.secrets import as_literals, hide, with_texts
from rlhf.config.stored import parse_sections

# Writing or parsing a configuration takes as long as a small save. A process does both repeatedly with nearly the same
# text: in each phase of a start, and for every checkpoint that the process inspects.
_CACHE_SIZE = 256


@dataclass(frozen=True)
class _CachedSection:
    """A section with its `repr`, the cache key: a section is mutable and has no hash."""

    text: str
    section: Any = field(compare=False)


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML. All values are resolved except secrets, which stay interpolations."""
    sections = {part.name: getattr(config, part.name) for part in fields(config)}
    return "".join(_to_yaml(name, _CachedSection(repr(section), section)) for name, section in sections.items())


@lru_cache(_CACHE_SIZE)
def _to_yaml(name: str, shown: _CachedSection) -> str:
    return OmegaConf.to_yaml(OmegaConf.create({name: with_texts(shown.section)}))


def from_yaml(text: str) -> Config:
    """Rebuild the dataclasses from a text of this release's `to_yaml`.

    Raises:
        OmegaConfBaseException: the text has a key that the schema lacks, or a value of another type.
    """
    return _parsed.__wrapped__(text) if "${" in text else deepcopy(_parsed(text))


@lru_cache(_CACHE_SIZE)
def _parsed(text: str) -> Config:
    return to_config(cast(DictConfig, OmegaConf.merge(schema(), OmegaConf.create(text))))


def from_stored(text: str, release: str | None) -> tuple[Config, list[Lost]]:
    """Rebuild the dataclasses from a text that any release's `to_yaml` made. Interpolations stay unresolved strings.

    Args:
        release: the release that made `text`; None if unknown.

    Returns:
        The configuration, and the stored values of removed settings that have no equivalent.

    Raises:
        OmegaConfBaseException: the text has a key that neither the schema nor a migration has.
        yaml.YAMLError: the text is not a YAML mapping, or has aliases.
    """
    config, lost = _migrated(text, release)
    return deepcopy(config), lost


def stored_tree(text: str, release: str | None, *, without: Collection[str]) -> DictConfig:
    """Return a stored configuration with its interpolations. The sections in `without` get their defaults instead.

    Raises like `from_stored`.
    """
    tree = migrate(parse_sections(text), release).tree
    kept = {name: section for name, section in tree.items() if name not in without}
    return cast(DictConfig, OmegaConf.merge(schema(), OmegaConf.create(kept)))


@lru_cache(_CACHE_SIZE)
def _migrated(text: str, release: str | None) -> tuple[Config, list[Lost]]:
    migrated = migrate(parse_sections(text), release)
    config = OmegaConf.to_object(OmegaConf.merge(schema(), as_literals(migrated.tree)))
    return cast(Config, config), migrated.lost


def to_config(tree: DictConfig) -> Config:
    """Resolve a configuration, with its secrets hidden.

    Raises:
        OmegaConfBaseException: an interpolation has no target.
    """
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    return hide(config, OmegaConf.to_container(tree))


@cache
def schema() -> DictConfig:
    """Return the schema with its defaults, into which stored texts are merged. Built once per process."""
    return OmegaConf.structured(Config)


def load(path: Path) -> Config:
    return from_yaml(path.read_text())
