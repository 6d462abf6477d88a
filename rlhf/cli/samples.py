"""python -m rlhf.samples RUN: shows the samples of a run, from `samples/` of its directory."""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf.cli.command import printed
from rlhf.cli.command_parser import CommandParser, count_of
from rlhf.errors import UserError
from rlhf.storage.layout import SAMPLES
from rlhf.tracking.sample_files import ROLLOUT, VALIDATION, SampleFiles, ShownSample, as_text

SHOWN = 10
"""Default of --count."""


def main(argv: list[str] | None = None) -> int:
    """Print the samples that the arguments select. Return the exit code: 0, or 2 if the run has no such samples."""
    parser = CommandParser(prog="python -m rlhf.samples", description=__doc__)
    count = count_of("samples")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--step", type=int, metavar="N", help="show samples of step N (default: the newest)")
    parser.add_argument("--all", action="store_true", help="show samples of all steps")
    parser.add_argument("--split", choices=(ROLLOUT, VALIDATION), help="show rollouts or evaluations only")
    parser.add_argument("--worst", type=count, metavar="K", help="show the K samples with the lowest scores")
    parser.add_argument("--best", type=count, metavar="K", help="show the K samples with the highest scores")
    parser.add_argument("--grep", metavar="TEXT", help="show samples whose prompt or response contains TEXT")
    parser.add_argument(
        "--count",
        type=count,
        default=SHOWN,
        metavar="N",
        help=f"show at most N samples (default: {SHOWN}); 0 for all",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON per sample, with its step")
    arguments = parser.parse_args(argv)
    return printed(lambda: _show(arguments))


def _show(arguments: argparse.Namespace) -> None:
    for step, sample in _chosen(arguments):
        if arguments.json:
            sys.stdout.write(json.dumps({"step": step, **sample}) + "\n")
        else:
            sys.stdout.write(f"step {step}, {as_text(sample)}\n\n")


def _chosen(arguments: argparse.Namespace) -> Iterable[tuple[int, ShownSample]]:
    files = SampleFiles(arguments.run)
    found = list(_matching(files, _steps(files, arguments), arguments))
    if not found:
        raise UserError(
            f"{arguments.run / SAMPLES} has no matching samples; it has samples of {_ranges(files.steps())}. "
            "trainer.log_rollouts is the number of rollouts stored in each step."
        )
    for count, sign in ((arguments.worst, 1), (arguments.best, -1)):
        if count is not None:
            return sorted(found, key=lambda pair: _rank(sign * float(pair[1]["score"])))[:count]
    return found[: arguments.count or None]


def _rank(score: float) -> tuple[bool, float]:
    """Return a sort key that puts NaN last."""
    return math.isnan(score), score


def _steps(files: SampleFiles, arguments: argparse.Namespace) -> list[int]:
    steps = files.steps()
    if not steps:
        what = "has no samples" if arguments.run.is_dir() else "is not a folder"
        raise UserError(
            f"{arguments.run} {what}. Give a run directory, <default_local_dir>/<project>/<experiment>, of a run that "
            "has finished a step."
        )
    if arguments.step is not None and arguments.step not in steps:
        raise UserError(f"--step={arguments.step}: the run has samples of {_ranges(steps)}. Give one of these steps.")
    return steps if arguments.all else [steps[-1] if arguments.step is None else arguments.step]


def _matching(files: SampleFiles, steps: list[int], arguments: argparse.Namespace) -> Iterator[tuple[int, ShownSample]]:
    for step in steps:
        for sample in files.read(step):
            texts = f"{sample.get('prompt')}\n{sample['response']}"
            if arguments.split in (None, sample.get("split")) and (arguments.grep or "") in texts:
                yield step, sample


def _ranges(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
