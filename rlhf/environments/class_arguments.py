"""Passes `env.kwargs` to the constructors of environment classes, and checks the arguments before the training."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlhf.errors import UserError, did_you_mean, nearest

KWARGS = "env.kwargs"
PREFLIGHT = "_preflight"
"""Name of an optional class method. The host calls it once with the constructor's arguments, before the training. The
method imports what the class needs, and raises UserError for a mistake in the arguments."""
OWN_PROCESS = "_own_process"
"""Name of an optional class attribute: True if the class uses global state, so that episodes cannot share a process."""


def with_arguments(classes: Sequence[type], kwargs: Mapping[str, Any], process: str) -> list[Callable[[], Any]]:
    """Return for each class a function that makes an object with the arguments that the class accepts.

    Args:
        process: the setting `env.process`.

    Raises:
        UserError: no class accepts an argument, a class lacks an argument, or a class rejects the arguments or
            `env.process`.
    """
    makers, accepted = [], set[str]()
    for made in classes:
        parameters = _parameters(made)
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        names = {each.name for each in named}
        own = {name: value for name, value in kwargs.items() if takes_all or name in names}
        accepted |= names | own.keys()
        for each in named:
            if each.default is each.empty and each.name not in own:
                near = nearest(each.name, kwargs.keys() - names)
                remedy = f"Rename {KWARGS}.{near}" if near else f"Set {KWARGS}.{each.name}=VALUE"
                raise UserError(f"{KWARGS}: {made.__name__} needs the argument {each.name}. {remedy}.")
        makers.append(partial(made, **own))
    for name in kwargs:
        if name not in accepted:  # the message has no value, which may be a secret
            raise UserError(
                f"{KWARGS}.{name}: no class of env.classes has this argument.{did_you_mean(nearest(name, accepted))} "
                "Correct or remove it."
            )
    for made, maker in zip(classes, makers, strict=True):
        if getattr(made, OWN_PROCESS, False) and process != "episode":
            raise UserError(
                f"env.process={process}: {made.__name__} uses global generators, so that episodes of one process would "
                "share them. Set env.process=episode."
            )
        if (preflight := getattr(made, PREFLIGHT, None)) is not None:
            preflight(**maker.keywords)
    return [*makers]


def _parameters(made: type) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(made).parameters.values())
    except ValueError:  # a class of an extension module
        return []
