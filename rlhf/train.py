"""Command line of the trainer, python -m rlhf.train: composes the configuration, checks it, starts the supervisor.

Nothing heavy is imported before the configuration is known to be right.
"""

import signal

from rlhf.ranks.stop import end_interrupted

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until the supervisor or the rank handles it; before the slow imports.
    signal.signal(signal.SIGINT, end_interrupted)

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial

from rlhf.arguments import parse
from rlhf.completion import answer
from rlhf.compose import compose_config, composition
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.config.validate import on_one_machine, validate
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.info import info_page, version_line
from rlhf.launch.banner import banner
from rlhf.printable import printable_output
from rlhf.ranks.open_files import raise_open_files


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. A user's mistake is one message on stderr and `EXIT_USER_ERROR`."""
    raise_open_files()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        sys.stderr.write(f"{printable_output(str(error))}\n")
        return EXIT_USER_ERROR


def _run(argv: list[str]) -> int:
    arguments = parse(argv)
    library = Library.find(arguments.config_dir)
    if (text := _asked(arguments, library)) is not None:
        sys.stdout.write(text)
        return EXIT_DONE
    if arguments.cfg:
        return _print_config(arguments.overrides, library)
    start = partial(_start, library=library, overrides=arguments.overrides)
    if arguments.multirun:
        from rlhf.sweep import plan, run_all

        return run_all(plan(arguments.overrides, library), start)
    config = compose_config(arguments.overrides, library)
    validate(config)
    return start(config)


def _asked(arguments: argparse.Namespace, library: Library) -> str | None:
    """What an option asks to be told, instead of a run."""
    if arguments.shell_completion is not None:
        return answer(arguments.shell_completion, library)
    if arguments.help:
        return library.help_page()
    if arguments.version:
        return version_line()
    return info_page() if arguments.info else None


def _print_config(overrides: list[str], library: Library) -> int:
    """Print every setting; what a run lacks is told beside it, and rules are checked once it lacks nothing."""
    composed = composition(overrides, library)
    sys.stdout.write(composed.commented_yaml())
    if composed.missing:
        sys.stderr.write(f"{composed.missing}\n")
    else:
        validate(composed.resolved())
    return EXIT_DONE


def _start(config: Config, library: Library, overrides: Sequence[str]) -> int:
    recipes = library.recipes(overrides)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        told = banner(config, recipes) if os.environ["RANK"] == "0" else ""
        if told:
            sys.stderr.write(f"{printable_output(told)}\n")
        check_inputs(config)
        from rlhf.worker import main_under_torchrun

        return main_under_torchrun(config, told)
    from rlhf.launch.supervisor import supervise

    return supervise(config, lambda: check_inputs(config), banner(config, recipes))


def check_inputs(config: Config) -> None:
    """Checks that may import heavy libraries, for after everything that a typo can break; raises UserError."""
    from rlhf.data import check_sources
    from rlhf.models.folder_check import check_folder, check_template
    from rlhf.reward import check_reward
    from rlhf.storage.layout import scan
    from rlhf.tracking import check_trackers

    # A run that goes on from a checkpoint, such as an imported one, has its weights there.
    begins = config.trainer.resume_mode != "resume_path" and not scan(config.run_dir) and not config.checkpoint.remote
    if on_one_machine():  # elsewhere the ranks find out who sees what
        check_folder("model.path", config.model.path, weights=begins)
        check_template(config.model.path, config.model.chat_template)
        if config.critic.path is not None:
            check_folder("critic.path", config.critic.path, tokenizer=False, weights=begins)
        if config.reward_model.path is not None:
            check_folder("reward_model.path", config.reward_model.path)
    check_reward(config.reward, config.reward_model)
    check_sources(config.data, config.reward, config.trainer.seed)
    check_trackers(config.trainer.logger, config.tracking.wandb)


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # As in worker.py: threads of the process group may still run, and abort a process that ends in order.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
