"""python -m rlhf.launch.slurm OVERRIDES: writes the batch script of a run and submits it to SLURM."""

import argparse
import subprocess
import sys
from pathlib import Path

from rlhf.cli import command
from rlhf.cli.command_parser import CommandParser, count_of
from rlhf.cli.submission import checked_runs
from rlhf.config.known_settings import SETTINGS
from rlhf.config.vllm_versions import installation_problem
from rlhf.errors import EXIT_DONE, UserError
from rlhf.launch.scheduler_times import stop_notice_s
from rlhf.launch.slurm.batch_script import Job, batch_script
from rlhf.launch.slurm.sbatch_options import asks_for_gpus, check_time, gpus_of, sort_words
from rlhf.planning.device_defaults import Machine, server_gpus
from rlhf.planning.devices import count_gpus


def main(argv: list[str] | None = None) -> int:
    """Submit the job, or print its script. Return an exit code of `rlhf.errors`."""
    return command.guarded(_run, argv)


def _run(argv: list[str]) -> int:
    words = sort_words(argv)
    arguments = _parser().parse_args(words.own)
    # Use the GPUs that the user asks for, because the nodes may have GPUs although this machine has none.
    machine = Machine(gpus_of(words.sbatch) or count_gpus() or 1, installation_problem())
    runs = checked_runs(words.overrides, arguments.config_dir, machine, multirun=arguments.multirun)
    config = runs[0].config
    check_time(words.sbatch, stop_notice_s(config.trainer))
    needed = None
    if config.trainer.device != "cpu" and not asks_for_gpus(words.sbatch):
        needed = config.trainer.ranks + server_gpus(lambda key: SETTINGS[key].value(config))
    array = None
    if arguments.multirun:
        parallel = f"%{arguments.array_parallelism}" if arguments.array_parallelism else ""
        array = f"0-{len(runs) - 1}{parallel}"
    jobs = [Job(run.config.run_dir.absolute(), run.arguments) for run in runs]
    script = batch_script(jobs, config.trainer, words.sbatch, array, needed)
    sys.stdout.write(script if arguments.dry_run else _submit(script))
    return EXIT_DONE


def _submit(script: str) -> str:
    """Submit the script with sbatch. Return the line for the user. Raise UserError if sbatch is missing or fails."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(
            "sbatch is not installed here. Give the command on a machine that submits jobs to SLURM; --dry-run prints "
            "the script."
        ) from None
    if done.returncode != 0:
        gpus = "" if "--gpus-per-node" not in script else " For a job without GPUs, set trainer.device=cpu."
        raise UserError(f"SLURM rejected the job: {done.stderr.strip()}.{gpus}")
    number = done.stdout.strip().partition(";")[0]
    return f"Submitted job {number}. Its log: rlhf-{number}*.log here. To stop it: scancel {number}\n"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m rlhf.launch.slurm",
        usage="%(prog)s [OVERRIDE ...] [trainer.nnodes=N] [-m] [--dry-run] [--SBATCH_OPTION=VALUE ...]",
        description="Submits python -m rlhf.train OVERRIDES to SLURM. All other options go to sbatch, such as "
        "--partition=gpu --account=lab --time=12:00:00 --cpus-per-task=8 (CPUs of each rank).",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    parser.add_argument("-m", "--multirun", action="store_true", help="a sweep as a job array, one task for each run")
    parser.add_argument(
        "--array-parallelism", type=count_of("jobs", 1), metavar="N", help="maximum jobs of a sweep at a time"
    )
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="as for python -m rlhf.train")
    return parser


if __name__ == "__main__":
    command.begin()
    sys.exit(main())
