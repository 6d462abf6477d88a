"""Parser of a command line that tells a mistake in one line, with the option that was meant."""

import argparse
from typing import NoReturn

from rlhf.errors import EXIT_USER_ERROR, did_you_mean, nearest


class CommandParser(argparse.ArgumentParser):
    """Parser whose mistakes are one line each, without the list of all options."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As the library's. A parser of a verb refuses itself what it does not know, which has the names near it."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            meant = nearest(unknown[0].split("=")[0], known) if unknown[0].startswith("-") else None
            self.error(f"{' '.join(unknown)} is not known.{did_you_mean(meant)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        end = "" if message.endswith((".", "?")) else "."
        self.exit(EXIT_USER_ERROR, f"{self.prog}: {message}{end} Its options: {self.prog} --help\n")
