"""Runs a sweep, python -m rlhf.train -m: a run for each combination of values, one after the other."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import xxhash
from omegaconf import OmegaConf

from rlhf.compose import combinations, composition, key_and_value
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.config.overrides import hydra_value
from rlhf.config.redaction import REDACTED
from rlhf.config.rules.validate import validate
from rlhf.config.secrets import member, with_marks
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, UserError
from rlhf.launch.stop_request import signals_received
from rlhf.planning.device_defaults import Machine
from rlhf.printable import printable_lines
from rlhf.ranks.logs import configure_logging
from rlhf.tracking.page import write_page
from rlhf.tracking.run_table import RunResult, run_table

log = logging.getLogger(__name__)

NAME = "trainer.experiment_name"
LONGEST_NAME = 200
"""A longer name of a run folder is cut to this many bytes; most file systems allow 255."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: its own values, as Hydra writes them but without secrets, and its configuration."""

    swept: tuple[str, ...]
    config: Config
    overrides: tuple[str, ...]
    """Arguments of `python -m rlhf.train` that start only this run."""
    experiment: str
    """The name of the experiment without the run's own values."""

    def __str__(self) -> str:
        return " ".join(self.swept)


def plan(overrides: Sequence[str], library: Library, machine: Machine | None = None) -> list[PlannedRun]:
    """Return the runs of the sweep, each with a directory named after the experiment and the run's own values.

    Device defaults are for `machine`; None means this machine.

    Raises:
        UserError: with the mistakes in all runs, before any run starts.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UserError("-m: a command under torchrun is a single run. Start each run separately, without -m.")
    found = combinations(overrides)
    if len({tuple(each.overrides) for each in found}) < len(found):
        raise UserError("-m: two runs of the sweep are the same. Give each value once.")
    runs, problems = [], []
    for combination in found:
        try:
            composed = composition(combination.overrides, library, machine)
            first = composed.resolved()
            swept = tuple(map(partial(_without_secrets, first), combination.swept, combination.numbers))
            experiment = first.trainer.experiment_name
            name = run_name(experiment, [text for text in swept if not text.startswith(f"{NAME}=")])
            OmegaConf.update(composed.tree, NAME, name)
            config = composed.resolved()
            validate(config)
            alone = [text for text in combination.overrides if not text.startswith(f"{NAME}=")]
            alone.append(f"{NAME}={hydra_value(name)}")
            runs.append(PlannedRun(swept, config, tuple(alone), experiment))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    if len({run.config.run_dir for run in runs}) < len(runs):
        raise UserError("-m: two runs of the sweep are the same. Give each value once.")
    return runs


def _without_secrets(config: Config, text: str, number: int) -> str:
    """Return the override `text` with REDACTED-`number` in place of each secret.

    `number`, the value's position in the sweep, gives each run a directory of its own, which the same command finds
    again.
    """
    key, value = key_and_value(text)
    marked = with_marks(value, reduce(member, key.split("."), config), f"{REDACTED}-{number}")
    return text if marked == value else f"{key}={hydra_value(marked)}"


def run_name(experiment: str, swept: Sequence[str]) -> str:
    """Return the name of a run's folder, such as `offline-actor.optim.lr-1e-05`.

    If special characters are replaced or the name is cut, a hash keeps names of different values apart.
    """
    plain = [re.sub(r"[^\w.-]", "_", text.replace("=", "-", 1)) for text in swept]
    name = "-".join([experiment, *plain])
    changed = [text for text, new in zip(swept, plain, strict=True) if text.replace("=", "-", 1) != new]
    if not changed and len(name.encode()) <= LONGEST_NAME:
        return name
    digest = xxhash.xxh3_64_hexdigest("\n".join(swept).encode())[:8]
    return f"{name.encode()[:LONGEST_NAME].decode(errors='ignore')}-{digest}"


def run_all(runs: Sequence[PlannedRun], start: Callable[[Config], int]) -> int:
    """Run all runs, even after failures, show their results, and return the exit code of the sweep.

    0: all runs are done. 75: a stop was requested; the same command continues the interrupted run. 1: a run crashed.
    2: runs failed, and all of them by a user's mistake.
    """
    configure_logging()
    codes: list[int] = []
    received = signals_received()
    for number, run in enumerate(runs, 1):
        log.info("Run %d of %d: %s, in %s", number, len(runs), run, run.config.run_dir)
        try:
            codes.append(start(run.config))
        except UserError as error:
            log.error("%s", error)
            codes.append(EXIT_USER_ERROR)
        except OSError as error:  # for example a stale file handle of a network disk
            log.error("%s", error)
            codes.append(EXIT_CRASHED)
        # A run that receives a stop signal in its last step still finishes with EXIT_DONE.
        stops = signals_received() > received and number < len(runs)
        if codes[-1] == EXIT_REQUEUE or stops:
            _show_results(runs, codes)
            log.warning("The sweep stopped at run %d of %d. The same command continues it.", number, len(runs))
            return EXIT_REQUEUE
    _show_results(runs, codes)
    failed = [(run, code) for run, code in zip(runs, codes, strict=True) if code != EXIT_DONE]
    log.info("%d of %d runs are done.", len(runs) - len(failed), len(runs))
    for run, code in failed:
        log.error("Failed with exit code %d: %s, in %s", code, run, run.config.run_dir)
    return EXIT_CRASHED if EXIT_CRASHED in codes else max(codes, default=EXIT_DONE)


def _show_results(runs: Sequence[PlannedRun], codes: Sequence[int]) -> None:
    """Log a table of the runs, and write a page with those that have metrics beside the run directories."""
    results = [_result(run, code) for run, code in zip(runs, [*codes, *[None] * (len(runs) - len(codes))], strict=True)]
    log.info("Results of the sweep:\n%s", printable_lines(run_table(results)))
    path = runs[0].config.run_dir.parent / f"{runs[0].experiment}-sweep.html"
    started = [run.config.run_dir for run, result in zip(runs, results, strict=True) if result.report.get("reward")]
    if started:
        try:
            write_page(path, started)
            log.info("Report of all runs: %s", path)
        except (OSError, UserError) as error:  # TimeoutError is an OSError
            log.warning("The report of all runs is not written: %s", error)


def _result(run: PlannedRun, code: int | None) -> RunResult:
    """Return the results of a run that ended with `code` (None: the run has not started)."""
    known = {EXIT_DONE: "finished", EXIT_REQUEUE: "stopped", None: "not started"}
    status = known.get(code, f"failed ({code})")
    try:
        return RunResult.read(str(run), run.config.run_dir, status)
    except UserError:  # the directory is missing or unreadable, for example after an early failure
        return RunResult(str(run), status, {})
