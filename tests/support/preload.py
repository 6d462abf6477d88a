"""Configures the server that forks tests' ranks: it imports once, without threads and process groups."""

import multiprocessing
import sys

OF_RUNS = [
    "rlhf.train",
    "rlhf.launch.supervisor",
    "rlhf.worker",
    # Imported late, as not every rank needs them: the command line, data in files, procedural data, the report,
    # adapters.
    "hydra",
    "datasets",
    "reasoning_gym",
    "jinja2",
    "peft",
]
OF_TESTS = [
    "pytest",
    "hypothesis",
    "tests.support.checkpoints",
    "tests.support.update_cases",
    "tests.support.adapted_engines",
    "tests.support.with_deepspeed",
]
# Python has one such server per process with one module list. Start ranks with this context, and set no other list.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    [*OF_RUNS, *(OF_TESTS if "pytest" in sys.modules else []), "tests.support.done_once", "tests.support.frozen"]
)
