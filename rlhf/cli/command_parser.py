"""Parses command lines, and reports a mistake in one line with the nearest option."""

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from rlhf.errors import EXIT_USER_ERROR, did_you_mean, nearest
from rlhf.printable import write_error

_UNITS = {"K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def byte_size(text: str) -> int:
    """Return the bytes of `80GB`, `79.2GiB` or `512M`, for `type` of an option.

    Raises:
        argparse.ArgumentTypeError: the text is not a size, or has no unit. A user who types 80 rarely means bytes.
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d*)?)\s*([KMGT])(i?)B?\s*", text, flags=re.IGNORECASE)
    size = 0
    if found is not None:
        size = int(float(found[1]) * (_BINARY_UNITS if found[3] else _UNITS)[found[2].upper()])
    if size == 0:
        hint = f"; write {text}GiB or {text}GB" if re.fullmatch(r"[1-9]\d{0,5}(\.\d+)?", text) else ""
        raise argparse.ArgumentTypeError(f"{text} is not a size with a unit, such as 80GB or 79.2GiB{hint}")
    return size


def count_of(what: str, least: int = 0) -> Callable[[str], int]:
    """Return a function for `type` of an option: a whole number of at least `least`."""

    def convert(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least {least} ({what})")
        return int(text)

    return convert


class CommandParser(argparse.ArgumentParser):
    """Reports mistakes in one line, without the list of all options."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse like argparse, but reject unknown options here, so that a verb's parser suggests the verb's options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            meant = nearest(unknown[0].split("=")[0], known) if unknown[0].startswith("-") else None
            self.error(f"{' '.join(unknown)} is not known.{did_you_mean(meant)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        write_error(f"{message}{end} To list the options: {self.prog} --help")
        self.exit(EXIT_USER_ERROR)
