"""A rank under Ray. Its worker writes the run's configuration to stdin."""

from rlhf.cli import command
from rlhf.ranks.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # before the slow imports
    command.begin()

import json
import sys

from rlhf.api import start
from rlhf.config.resolved import from_yaml


def main(argv: list[str] | None = None) -> int:
    """Run the rank, and return an exit code of `rlhf.errors`."""
    return command.guarded(_run, argv)


def _run(argv: list[str]) -> int:
    job = json.load(sys.stdin)
    return start(from_yaml(job["config"]), job["recipes"])


if __name__ == "__main__":
    command.leave(main())
