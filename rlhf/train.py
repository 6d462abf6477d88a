"""Command line of the trainer, python -m rlhf.train: composes the configuration, checks it, starts the supervisor.

Nothing heavy is imported before the configuration is known to be right.
"""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until the supervisor or the rank handles it, Ctrl-C ends the command as SIGTERM does, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.config.resolved import to_yaml
from rlhf.config.validate import validate
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.ranks.open_files import raise_open_files


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. A user's mistake is one message on stderr and `EXIT_USER_ERROR`."""
    raise_open_files()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER_ERROR


def _run(argv: list[str]) -> int:
    arguments = _parse(argv)
    library = Library.find(arguments.config_dir)
    if arguments.help:
        sys.stdout.write(library.help_page())
        return EXIT_DONE
    config = compose_config(arguments.overrides, library)
    validate(config)
    if arguments.cfg:
        sys.stdout.write(to_yaml(config))
        return EXIT_DONE

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        check_inputs(config)
        from rlhf.worker import main_under_torchrun

        return main_under_torchrun(config)
    from rlhf.launch.supervisor import supervise

    return supervise(config, lambda: check_inputs(config))


def check_inputs(config: Config) -> None:
    """Checks that may import heavy libraries, for after everything that a typo can break; raises UserError."""
    from rlhf.data import check_sources
    from rlhf.reward import check_reward
    from rlhf.tracking import check_trackers

    check_sources(config.data, config.reward.functions, config.trainer.seed)
    check_reward(config.reward, config.reward_model)
    check_trackers(config.trainer.logger)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help shows the usage)")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--cfg", choices=("job",))
    parser.add_argument("--help", "-h", action="store_true")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # As in worker.py: threads of the process group may still run, and abort a process that ends in order.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
