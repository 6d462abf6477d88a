"""Parses the arguments of python -m rlhf.train, and suggests settings for unknown options."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from rlhf.config.names.hints import nearest_setting, override_for, remark
from rlhf.errors import UserError, did_you_mean, nearest

FLAGS = ("--help", "-h", "--version", "--info", "--multirun", "-m")
WITH_VALUE = ("--config-dir", "--cfg", "--shell-completion", "-sc")
NO_SYNONYMS: Mapping[str, str] = MappingProxyType({})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help shows the usage)")


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options, and all other arguments as `overrides`. Raise UserError for unknown options."""
    check_options(argv, FLAGS, WITH_VALUE)
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--cfg", choices=("job",))
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--shell-completion", "-sc", metavar="install=bash")
    for flag in ("--version", "--info"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    return parser.parse_intermixed_args(argv)


def check_options(
    argv: Sequence[str],
    flags: Sequence[str],
    with_value: Sequence[str],
    synonyms: Mapping[str, str] = NO_SYNONYMS,
) -> None:
    """Raise one UserError for all options that are neither in `flags` nor in `with_value`.

    For an option in `synonyms`, the message shows the option that the synonym means. For an option with the name of
    a setting, of this trainer or another trainer, the message shows the setting to write.
    """
    if problems := list(_unknown(argv, flags, with_value, synonyms)):
        raise UserError("\n".join(problems))


def _unknown(
    argv: Sequence[str], flags: Sequence[str], with_value: Sequence[str], synonyms: Mapping[str, str]
) -> Iterator[str]:
    words = iter(zip_longest(argv, argv[1:], fillvalue=""))
    for word, following in words:
        option, equals, value = word.partition("=")
        if option in with_value and not equals:
            next(words, None)
        elif option not in (*flags, *with_value) and option.startswith("-") and option.strip("-"):
            if not equals and following and not following.startswith("-") and "=" not in following:
                value = following
                next(words)
            typed = word if equals or not value else f"{word} {value}"
            name = option.lstrip("-")
            if meant := synonyms.get(name):
                yield f"{typed}: there is no such option.{did_you_mean(f'{meant} {value}'.rstrip())}"
            else:
                yield _explained(typed, name, value, (*flags, *with_value))


def _explained(typed: str, name: str, value: str, options: Sequence[str]) -> str:
    key = name.replace("-", "_")
    if text := remark(key):
        return f"{typed}: there is no such option. {text}"
    if setting := "recipes" if key == "recipes" else nearest_setting(key):
        override = override_for(setting, value) or f"{setting}={value or 'VALUE'}"
        return f"{typed}: settings are written without dashes. Did you mean {override}?"
    option = nearest(f"--{name}", options)
    return f"{typed}: there is no such option.{did_you_mean(option)} --help shows the usage."
