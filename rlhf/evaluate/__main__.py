"""python -m rlhf.evaluate TARGET ...: evaluates models and checkpoints on held-out prompts, without training."""

from rlhf.cli import command

if __name__ == "__main__":
    command.begin()

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.api import evaluate_policy, is_rank
from rlhf.cli.arguments import check_options
from rlhf.cli.command_parser import CommandParser
from rlhf.config.library import Library
from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, UserError
from rlhf.evaluate.consent import FLAG
from rlhf.evaluate.results import check_same, files_of, store_result, stored_result, table
from rlhf.evaluate.target_settings import plan
from rlhf.evaluate.targets import find_target
from rlhf.launch.stop_request import signals_received
from rlhf.printable import printable_lines

log = logging.getLogger(__name__)
FLAGS = ("--json", FLAG, "--help", "-h")
WITH_VALUE = ("--config-dir",)
TARGET_KEYS = ("model.path", "target", "targets", "trainer.resume_from_path")
"""Settings by which users may wrongly name a target (`model.path=TARGET`); the UserError shows the right command."""


def main(argv: list[str] | None = None) -> int:
    """Evaluate the targets and print their results. Return an exit code of `rlhf.errors`."""
    return command.guarded(_run, argv)


def _run(words: Sequence[str]) -> int:
    check_options(words, FLAGS, WITH_VALUE)
    # argparse does not accept options between overrides, so separate the overrides first.
    overrides = [word for word in words if "=" in word and not word.startswith("-") and not os.path.exists(word)]  # noqa: PTH110
    others = [word for word in words if word not in overrides]
    _check_for_target(others, overrides)
    arguments = _parser().parse_args(others)
    targets = [find_target(name) for name in dict.fromkeys(arguments.targets)]
    if is_rank() and len(targets) > 1:
        raise UserError(
            f"{targets[1].name}: a command under torchrun evaluates one target. Run one command for each target. Then "
            "python -m rlhf.evaluate with all targets shows one table."
        )
    library = Library.find(arguments.config_dir)
    planned = plan(targets, overrides, library, trusts_settings=arguments.trust_settings)
    # Compare stored results before the first evaluation, to report changed settings at once. Under torchrun, other
    # nodes may lack the files, so do not compare there.
    stored = [None if is_rank() else stored_result(each) for each in planned]
    results: list[dict[str, Any]] = []
    # Hash all files before the first evaluation, to reject a file that changes between two targets.
    files = [files_of(each) for each in planned]
    for number, (each, before, earlier) in enumerate(zip(planned, files, stored, strict=True), 1):
        if earlier is None:
            check_same(each, before, files_of(each))
            title = f"Evaluation {number} of {len(planned)}: {each.target.name}"
            code = evaluate_policy(each.config, f"{title}, in {each.config.run_dir}")
            if code != EXIT_DONE or not _leads():
                return code
            check_same(each, before, files_of(each))
            earlier = store_result(each, before)
            if signals_received() and number < len(planned):  # too late to stop this evaluation
                log.warning("A stop signal came. The same command continues with %s.", planned[number].target.name)
                return EXIT_REQUEUE
        results.append(earlier)
    if _leads():
        _show(results, as_json=arguments.json)
    return EXIT_DONE


def _check_for_target(others: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise UserError if the command names the target by a setting, such as model.path, as other commands do."""
    for key, _, value in (text.partition("=") for text in overrides):
        if not others and key in TARGET_KEYS and value:
            raise UserError(
                f"{key}={value}: a target is written without {key}=. Write python -m rlhf.evaluate {value}."
            )


def _leads() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _show(results: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    text = json.dumps({"results": list(results)}, indent=1) if as_json else printable_lines(table(results))
    sys.stdout.write(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m rlhf.evaluate", usage=f"%(prog)s TARGET ... [OVERRIDE ...] [--json] [{FLAG}]"
    )
    parser.description = __doc__
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="a model in Hugging Face format (folder or Hub name), a run directory (its newest checkpoint), or a "
        "checkpoint (global_step_N); OVERRIDEs are settings as for python -m rlhf.train, such as data.val_files=FILE",
    )
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="as for python -m rlhf.train")
    parser.add_argument("--json", action="store_true", help="print one JSON document with all metrics")
    parser.add_argument(
        FLAG,
        action="store_true",
        help="run code that the targets' stored settings name, with the rights that these settings give it",
    )
    return parser


if __name__ == "__main__":
    command.leave(main())
