"""python -m rlhf.doctor OVERRIDES: checks this node for python -m rlhf.train OVERRIDES, or under torchrun all nodes."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rlhf.api import is_rank
from rlhf.cli import command
from rlhf.cli.arguments import check_options
from rlhf.cli.command_parser import CommandParser
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.redaction import Redaction
from rlhf.config.rules.validate import validate
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.config.secrets import export
from rlhf.diagnosis.check_result import CheckResult, run_checks
from rlhf.diagnosis.local_ranks import check_collectives
from rlhf.diagnosis.node_checks import check_node
from rlhf.errors import EXIT_CRASHED, EXIT_DONE
from rlhf.printable import printable

FLAGS = ("--json", "--help", "-h")
WITH_VALUE = ("--config-dir",)
NODE_DEADLINE_S = 40.0
"""Seconds for the checks of a node. The longest check starts a confined process."""
COLLECTIVES_S = 120.0
"""Seconds for the collective test on one node, with the imports of its ranks."""
HERE = "this node"


def main(argv: list[str] | None = None) -> int:
    """Check the machines. Return the exit code: 0, 1 if a check found an error, or 2 for a mistake in the settings."""
    return command.guarded(_run, argv)


def _run(argv: list[str]) -> int:
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    check_options(argv, FLAGS, WITH_VALUE)
    # argparse does not accept options between overrides, so put the options first.
    arguments = _parser().parse_args([*(word for word in argv if word not in overrides), *overrides])
    config = compose_config(arguments.overrides, Library.find(arguments.config_dir))
    validate(config, here=False)
    export(config)
    if is_rank():
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch prints pages about a rank that never connects
        from rlhf.diagnosis.cluster_checks import check_cluster

        results, prints = check_cluster(config, NODE_DEADLINE_S)
    else:
        results, prints = check_node(config, HERE, NODE_DEADLINE_S), True
        results += _collectives(config.trainer)
    if prints:
        _print(results, as_json=arguments.json)
    return EXIT_CRASHED if any(each.level == "error" for each in results) else EXIT_DONE


def _collectives(trainer: TrainerConfig) -> list[CheckResult]:
    checks = {"collectives": lambda: check_collectives(trainer.device, COLLECTIVES_S)}
    found = run_checks(checks, HERE, COLLECTIVES_S + 10.0)
    if trainer.nnodes > 1:
        text = (
            f"trainer.nnodes={trainer.nnodes}, but only this node was checked. Start the command on every node with "
            "torchrun or srun."
        )
        found.append(CheckResult("warning", "nodes", text, HERE))
    return found


def _print(results: Sequence[CheckResult], *, as_json: bool) -> None:
    redact = Redaction(os.environ)
    if as_json:
        document = [asdict(each) | {"text": redact(each.text)} for each in results]
        sys.stdout.write(json.dumps({"checks": document}, indent=1) + "\n")
    else:
        sys.stdout.write("".join(f"{printable(redact(line))}\n" for line in lines(results)))
    sys.stdout.flush()


def lines(results: Sequence[CheckResult]) -> Iterator[str]:
    """Yield a line for each warning or error, and one line per check for all nodes on which the check is ok."""
    width = max((len(each.check) for each in results), default=0)
    order = {name: position for position, name in enumerate(dict.fromkeys(each.check for each in results))}
    for _, group in groupby(sorted(results, key=lambda each: order[each.check]), key=lambda each: each.check):
        of_check = list(group)
        nodes = {each.node for each in of_check}
        fine = [each for each in of_check if each.level == "ok"]
        for each in [*(each for each in of_check if each.level != "ok"), *fine[:1]]:
            where = f"{each.node}: " if len(nodes) > 1 else ""
            others = f" (and on {len(fine) - 1} more nodes)" if each.level == "ok" and len(fine) > 1 else ""
            yield f"{each.level:<7}  {each.check:<{width}}  {where}{each.text}{others}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m rlhf.doctor", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for python -m rlhf.train")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="as for python -m rlhf.train")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    return parser
