"""Adapters that run environments of other libraries, one file per library. Each library is an optional extra."""

import importlib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlhf.environments.class_arguments import KWARGS
from rlhf.errors import UserError, did_you_mean, nearest


def need_package(who: str, package: str, extra: str) -> None:
    """Raise UserError if `package`, which the adapter `who` runs, is not installed."""
    try:
        version(package)
    except PackageNotFoundError:
        raise UserError(
            f"{who} needs the package {package}, which is not installed; run `pip install 'rlhf[{extra}]'`."
        ) from None


def check_id(library: str, name: str, known: Iterable[str]) -> None:
    """Raise UserError if `env.kwargs.id` is not the name of one of the library's environments."""
    names = sorted(known)
    if name not in names:
        near = nearest(str(name), names)
        listed = did_you_mean(near) if near else f" It has, for example, {', '.join(names[:8])}."
        raise UserError(f"{KWARGS}.id={name}: {library} has no environment of this name.{listed} Correct the name.")


def preflight_program(script: str, kwargs: Mapping[str, Any]) -> None:
    """Check `env.kwargs` for a program of this folder, and import what the program needs. Ignore other programs."""
    path = Path(script)
    if path.parent == Path(__file__).parent:
        importlib.import_module(f"{__name__}.{path.stem}").preflight(**kwargs)
