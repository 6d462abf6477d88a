"""python -m rlhf.checkpoint VERB ...: list, verify, prune and convert checkpoints."""

import errno
import importlib
import sys
from typing import Any

from rich.console import Console

from rlhf.cli.command_parser import CommandParser
from rlhf.errors import EXIT_CRASHED, EXIT_USER_ERROR, UserError, did_you_mean, nearest
from rlhf.printable import printable, write_error
from rlhf.storage.disk_errors import DamagedCheckpoint

VERBS = {
    "list": "rlhf.checkpoint.verbs.list",
    "inspect": "rlhf.checkpoint.verbs.inspect",
    "verify": "rlhf.checkpoint.verbs.verify",
    "prune": "rlhf.checkpoint.verbs.prune",
    "convert": "rlhf.convert.verbs.convert",
    **dict.fromkeys(("merge", "export", "import"), "rlhf.convert.verbs.convert"),
    "test": "rlhf.convert.verbs.test",
    "diff": "rlhf.convert.verbs.diff",
    "push": "rlhf.convert.verbs.pushing",
}
"""Verb -> its module, with `HELP`, `add_arguments(parser)` and `run(arguments, console) -> int`. Only `run`
imports torch."""
ALIASES: dict[str, tuple[str, dict[str, str | None]]] = {
    "merge": ("convert --to hf: make a Hugging Face folder of a training checkpoint", {"to": "hf", "adapter": None}),
    "export": (
        "convert --to hf --backend native: make a Hugging Face folder of a run or native checkpoint",
        {"to": "hf", "adapter": None, "backend": "native"},
    ),
    "import": ("convert --to native: another tool's checkpoint becomes the start of a new run", {"to": "native"}),
}
"""Alias of `convert` -> its help, and the arguments that it sets."""

DISK_FULL = "Free disk space there, or give a path on another disk."
NOT_PERMITTED = "Give another path, or get permission for this path."
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), DISK_FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), NOT_PERMITTED),
    errno.ENAMETOOLONG: "Give a shorter name.",
}
"""errno -> remedy in the error message."""
EXIT_INTERRUPTED = 130
"""The shell's exit code of a command that Ctrl-C ended."""


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return the exit code: 0 for success (intact, equal), 1 for damage, a difference, or a failed read
    or write, 2 for a user's mistake, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    parser = CommandParser(prog="python -m rlhf.checkpoint", description=__doc__)
    if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
        parser.error(f"{argv[0]} is not a verb; use one of {', '.join(VERBS)}.{did_you_mean(nearest(argv[0], VERBS))}")
    commands = parser.add_subparsers(required=True, metavar="VERB")
    for name in argv[:1] if argv[:1] and argv[0] in VERBS else VERBS:
        verb: Any = importlib.import_module(VERBS[name])
        help_text, preset = ALIASES.get(name, (verb.HELP, {}))
        command = commands.add_parser(name, help=help_text, description=help_text)
        verb.add_arguments(command)
        command.set_defaults(run=verb.run, **preset)
    arguments = parser.parse_args(argv)
    # Only a terminal limits the width. No markup: names and texts come from files.
    piped = not sys.stdout.isatty()
    console = Console(highlight=False, markup=False, soft_wrap=piped, width=1000 if piped else None)
    try:
        return arguments.run(arguments, console)
    except (UserError, DamagedCheckpoint) as error:
        write_error(printable(str(error)))
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_CRASHED
    except OSError as error:
        if error.filename is None:  # not a disk error
            raise
        remedy = REMEDIES.get(error.errno or 0, "")
        write_error(printable(f"{error.filename}: {error.strerror}" + (f". {remedy}" if remedy else "")))
        return EXIT_CRASHED
    except KeyboardInterrupt:
        sys.stderr.write("Stopped. Nothing is left half done; run the same command again to finish.\n")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
