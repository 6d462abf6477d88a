"""Command line of the trainer: python -m rlhf.train. Imports nothing heavy before the configuration is checked."""

from rlhf.cli import command

if __name__ == "__main__":
    command.begin()

import argparse
import inspect
import sys
from functools import partial
from types import ModuleType
from typing import Any

from rlhf.api import start, train, validated
from rlhf.cli.arguments import parse
from rlhf.cli.completion import answer
from rlhf.cli.info import info_page, version_line
from rlhf.compose import composition
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.errors import EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return command.guarded(_run, argv)


def _run(argv: list[str]) -> int:
    arguments = parse(argv)
    library = Library.find(arguments.config_dir)
    if (text := _information(arguments, library)) is not None:
        sys.stdout.write(text)
        return EXIT_DONE
    if arguments.cfg:
        return _print_config(arguments.overrides, library)
    begin = partial(start, recipes=library.recipes(arguments.overrides))
    if arguments.multirun:
        from rlhf.cli.sweep import plan, run_all

        return run_all(plan(arguments.overrides, library), begin)
    return begin(validated(arguments.overrides, library))


def _information(arguments: argparse.Namespace, library: Library) -> str | None:
    """Return the output of `--help`, `--version`, `--info` or `--shell-completion`; None without such an option."""
    if arguments.shell_completion is not None:
        return answer(arguments.shell_completion, library)
    if arguments.help:
        return library.help_page()
    if arguments.version:
        return version_line()
    return info_page() if arguments.info else None


def _print_config(overrides: list[str], library: Library) -> int:
    """Print all settings to stdout, and missing settings to stderr. If no setting is missing, check the rules."""
    composed = composition(overrides, library)
    sys.stdout.write(composed.commented_yaml())
    if composed.missing:
        sys.stderr.write(f"{composed.missing}\n")
    else:
        validate(composed.resolved())
    return EXIT_DONE


class _Callable(ModuleType):
    """Makes this module callable, because importing it replaces the function `rlhf.train` by the module."""

    def __call__(self, *overrides: Any, **options: Any) -> dict[str, Any]:
        return train(*overrides, **options)


sys.modules[__name__].__class__ = _Callable
# For `help(rlhf.train)` and a notebook's `rlhf.train?`, which would otherwise describe this module.
__all__ = ["train"]
__doc__ = train.__doc__ or ""
__signature__ = inspect.signature(train)


if __name__ == "__main__":
    command.leave(main())
