"""Reads an environment class: its tools as JSON schemas, its free-text method, and whether it rewards episodes."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MethodType
from typing import Any

from rlhf.config.user_functions import ENV_CLASSES
from rlhf.environments import FREE_TEXT
from rlhf.errors import UserError

NO_TOOLS = ("reset", "get_reward", "close", "state_dict", "load_state_dict")
"""Public methods that are not tools."""


@dataclass(frozen=True)
class Definition:
    """The tools and methods of an environment class."""

    label: str
    """Name of the class. A row's column `environment` has this name, and metrics show the reward under this name."""
    tools: list[dict[str, Any]]
    """JSON schema of each tool, in OpenAI's form; empty for free text."""
    step: str | None
    """Name of the free-text method; None if the class has tools."""
    rewards: bool
    """Whether the class has `get_reward`."""
    is_agent: bool = False
    """Whether this is the program of `env.command`."""


def define(spec: str, made: type) -> Definition:
    """Return the definition of the class. Raise UserError if it lacks `reset`, or its methods cannot be tools."""
    shown = f"{ENV_CLASSES}={spec}"
    if not callable(getattr(made, "reset", None)):
        raise UserError(
            f"{shown}: {made.__name__} has no method reset. Add reset(self, **row), which begins an episode."
        )
    check_state(shown, made.__name__, [name for name in NO_TOOLS if callable(getattr(made, name, None))])
    names = [name for name in dir(made) if not name.startswith("_") and name not in NO_TOOLS]
    methods = {name: method for name in names if inspect.isroutine(method := getattr(made, name))}
    steps = [name for name, method in methods.items() if getattr(method, FREE_TEXT, False)]
    if len(steps) > 1:
        raise UserError(f"{shown}: {' and '.join(steps)} are both marked with free_text. Mark one method.")
    if steps and len(methods) > 1:
        others = ", ".join(name for name in methods if name not in steps)
        raise UserError(
            f"{shown}: {made.__name__} reads free text ({steps[0]}), so its other public methods cannot be tools: "
            f"{others}. Start their names with _, or remove the mark."
        )
    if not methods:
        raise UserError(
            f"{shown}: {made.__name__} has no tool and no free-text method. Add a public method with types and a "
            "docstring, or mark step(self, text) with rlhf.environments.free_text."
        )
    tools = [] if steps else [_schema(shown, name, method) for name, method in methods.items()]
    rewards = callable(getattr(made, "get_reward", None))
    return Definition(made.__name__, tools, steps[0] if steps else None, rewards)


def check_state(shown: str, name: str, methods: Collection[str]) -> None:
    """Raise UserError if a class has `state_dict` without `load_state_dict`."""
    if "state_dict" in methods and "load_state_dict" not in methods:
        raise UserError(
            f"{shown}: {name} has the method state_dict, but no method load_state_dict. A resumed run restores an "
            "unfinished episode with both. Add load_state_dict, or remove state_dict."
        )


def _schema(shown: str, name: str, method: Callable[..., Any]) -> dict[str, Any]:
    # This import takes a second, and environments of free text do not need the module.
    from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    # Bind the method to any object, as TRL does, so that `self` is not in the schema.
    bound = method if inspect.ismethod(method) else MethodType(method, object())
    try:
        return get_json_schema(bound)
    except (DocstringParsingException, TypeHintParsingException) as error:
        why = str(error).rstrip(".")
        raise UserError(
            f"{shown}: the tool {name} has no complete types and docstring: {why}. Add a type to each parameter, and "
            "a Google-style docstring whose Args describe each parameter; or start its name with _."
        ) from error
