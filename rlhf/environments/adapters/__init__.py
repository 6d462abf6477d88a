"""Adapters that run environments of other libraries: one file per library, which is an optional extra."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from rlhf.environments.constructor_arguments import KWARGS
from rlhf.errors import UserError, did_you_mean, nearest


def need_package(who: str, package: str, extra: str) -> None:
    """Raise UserError if `package`, which the class `who` runs, is not installed."""
    try:
        version(package)
    except PackageNotFoundError:
        raise UserError(
            f"env.classes: {who} needs the package {package}, which is not installed; run `pip install 'rlhf[{extra}]'`."
        ) from None


def check_id(library: str, name: str, known: Iterable[str]) -> None:
    """Raise UserError if `env.kwargs.id` is not the name of one of the library's environments."""
    names = sorted(known)
    if name not in names:
        near = nearest(name, names)
        listed = did_you_mean(near) if near else f" It has, for example, {', '.join(names[:8])}."
        raise UserError(f"{KWARGS}.id={name}: {library} has no environment of this name.{listed} Correct the name.")
