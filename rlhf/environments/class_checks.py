"""Checks the section `env` by parsing users' files, then by importing the classes in a confined process."""

import ast
import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.agent_command import split_command
from rlhf.config.schema.env import EnvConfig
from rlhf.config.user_functions import ENV_CLASSES, find_class, split_spec
from rlhf.environments.definition import NO_TOOLS, check_state
from rlhf.environments.host_handle import Host
from rlhf.errors import UserError, did_you_mean, nearest
from rlhf.reward.signature import Signature

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
ALWAYS = ("seed", "prompt", "data_source", "ground_truth")
"""Arguments of `reset` that every row has."""
COLUMN = "environment"
"""Column of the data that names the class of a row, if `env.classes` has several."""


def labels_of(config: EnvConfig) -> list[str]:
    """Return the name of each class."""
    return [split_spec(ENV_CLASSES, spec)[1] for spec in config.classes]


def check_environments(config: EnvConfig) -> None:
    """Raise UserError for a missing file or class, a class without `reset`, an untyped tool, or wrong settings."""
    for spec in config.classes:
        found = find_class(ENV_CLASSES, spec)
        # Skip a class with a base class: only an import shows the methods that it inherits.
        if found is not None and not any(not isinstance(b, ast.Name) or b.id != "object" for b in found.bases):
            _check_class(f"{ENV_CLASSES}={spec}", found)
    if config.command is not None:
        split_command(config.command)
    labels = labels_of(config)
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise UserError(f"{ENV_CLASSES}={config.classes}: two classes are called {label}. Rename one.")
    for name in config.pass_env:
        if name not in os.environ:
            raise UserError(f"env.pass_env={config.pass_env}: {name} is not set. Set it, or remove it here.")
    for folder in config.writable:
        if not Path(folder).expanduser().is_dir():
            raise UserError(f"env.writable={config.writable}: {folder} is not a folder. Create it, or remove it here.")


@dataclass(frozen=True)
class ResetArguments:
    """The parameters of a class's `reset`, read from its file."""

    shown: str
    """The setting and the class, for messages."""
    named: tuple[str, ...]
    needed: tuple[str, ...]
    """Parameters in `named` without a default."""


def reset_arguments(config: EnvConfig) -> dict[str, ResetArguments]:
    """Return the parameters by class name, without the classes whose `reset` is inherited, decorated or imported."""
    found = {}
    for spec, label in zip(config.classes, labels_of(config), strict=True):
        made = find_class(ENV_CLASSES, spec)
        if made is None or made.decorator_list:
            continue
        for node in made.body:
            if isinstance(node, FUNCTIONS) and node.name == "reset" and not node.decorator_list:
                signature = Signature.of_definition(node)
                own = [each.arg for each in [*node.args.posonlyargs, *node.args.args]][:1]  # self
                named, needed = (
                    tuple(name for name in names if name not in own) for names in (signature.named, signature.required)
                )
                found[label] = ResetArguments(f"{ENV_CLASSES}={spec}", named, needed)
    return found


def _check_class(shown: str, found: ast.ClassDef) -> None:
    methods = [node for node in found.body if isinstance(node, FUNCTIONS)]
    names = [method.name for method in methods]
    if found.decorator_list:
        return  # a decorator may add methods
    if "reset" not in names:
        raise UserError(
            f"{shown}: {found.name} has no method reset.{did_you_mean(nearest('reset', names))} Add "
            "reset(self, **row), which begins an episode."
        )
    assigned = [target for node in found.body if isinstance(node, ast.Assign) for target in node.targets]
    check_state(shown, found.name, [*names, *(each.id for each in assigned if isinstance(each, ast.Name))])
    for method in methods:
        by_position = Signature.of_definition(method).positional[1:]  # without self
        if method.name == "reset" and not method.decorator_list and by_position:
            raise UserError(
                f"{shown}: reset takes {', '.join(by_position)} by position only, but is called by keyword. "
                "Remove the /."
            )
        if method.name.startswith("_") or method.name in NO_TOOLS or method.decorator_list:
            continue
        arguments = method.args
        untyped = [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs] if not a.annotation]
        if (missing := [name for name in untyped if name != "self"]) or not ast.get_docstring(method):
            what = f"the parameter {missing[0]} has no type" if missing else "it has no docstring"
            raise UserError(
                f"{shown}: {method.name}: {what}. A public method is a tool: add a type to each parameter and a "
                "docstring whose Args describe each parameter; or start its name with _; or mark it with "
                "rlhf.environments.free_text if it reads the policy's text."
            )


def check_row(config: EnvConfig, record: dict[str, object], where: str) -> None:
    """Raise UserError if there are several classes and the row does not name one of them."""
    labels = labels_of(config)
    if len(labels) < 2 or record.get(COLUMN) in labels:
        return
    if COLUMN not in record:
        raise UserError(
            f"{where}: {ENV_CLASSES} has {len(labels)} classes, but the row has no column {COLUMN}. Add it, with "
            f"one of {', '.join(labels)}."
        )
    near = did_you_mean(nearest(str(record[COLUMN]), labels))
    raise UserError(
        f"{where}: {COLUMN}={record[COLUMN]!r} is none of {', '.join(labels)} ({ENV_CLASSES}).{near} Correct the row."
    )


def check_reset(
    config: EnvConfig,
    resets: Mapping[str, ResetArguments],
    record: Mapping[str, object],
    more: Collection[str],
    where: str,
) -> None:
    """Raise UserError if the `reset` of a row's class has a parameter without a default that the row does not give.

    Args:
        resets: the result of `reset_arguments`.
        record: the row's columns.
        more: names in the row's `extra_info`, which `reset` receives, too.
    """
    label = str(record.get(COLUMN)) if len(config.classes) > 1 else next(iter(resets), "")
    if label not in resets:
        return
    for name in resets[label].needed:
        if name not in record and name not in more and name not in ALWAYS:
            raise UserError(
                f"{where}: {resets[label].shown}: reset takes {name}, but the row has no column {name}. Its columns: "
                f"{', '.join(record) or 'none'}.{did_you_mean(nearest(name, [*record, *more]))} Rename a column to "
                f"{name}, or give the parameter {name} a default."
            )


@contextlib.contextmanager
def preflight_environments(config: EnvConfig | None) -> Iterator[None]:
    """Import the classes in a confined process, as the training will, while the `with` body runs.

    Then raise UserError for a class that cannot be imported or is not an environment, or if programs cannot be
    confined.
    """
    if config is None or not config.used:
        yield
        return
    host = Host(config)
    with ThreadPoolExecutor(1) as threads:
        try:
            started = threads.submit(host.start)
            yield
            started.result()
        finally:
            host.close()
