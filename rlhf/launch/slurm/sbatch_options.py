"""Sorts the words of the command line: options of this command, options for sbatch, and overrides of settings."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf.errors import UserError

OWN = ("--dry-run", "--multirun", "-m", "--help", "-h")
OWN_WITH_VALUE = ("--config-dir", "--array-parallelism")
SET_HERE = {
    "nodes": "Set trainer.nnodes.",
    "ntasks": "Set trainer.nproc, the number of ranks on each machine.",
    "ntasks-per-node": "Set trainer.nproc.",
    "gpus-per-task": "Write --gpus-per-node: each rank chooses its GPU among those of its machine.",
    "array": "Write -m for a sweep, and --array-parallelism=N for N jobs at a time.",
    "signal": "Set trainer.preempt_grace_s, the time for the run's last step and save.",
    "requeue": "The script always allows requeues.",
    "no-requeue": "A job continues only if SLURM requeues it. To stop the job, use scancel.",
    "wrap": "The command writes the script.",
    "chdir": "Start the command in that folder: relative paths of settings belong to the folder of the command.",
}
"""For each sbatch option that the script sets: what users write instead."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass
class SortedWords:
    """The words of a command line."""

    own: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    sbatch: dict[str, str | None] = field(default_factory=dict)
    """Options for sbatch without dashes, with their values; None for an option without a value."""


def sort_words(words: Sequence[str]) -> SortedWords:
    """Return the sorted words. Raise one UserError for all options that are malformed or that the command sets."""
    found, problems = SortedWords(), list[str]()
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        option, equals, value = word.partition("=")
        name = option.removeprefix("--")
        if option in OWN_WITH_VALUE:
            found.own.append(word if equals else f"{word}={remaining.pop(0) if remaining else ''}")
        elif word in OWN:
            found.own.append(word)
        elif not word.startswith("-"):
            found.overrides.append(word)
        elif not word.startswith("--") or "." in name or not name:
            problems.append(f"{word}: write options of sbatch as --NAME=VALUE, and settings as KEY=VALUE.")
        elif not word.isprintable():  # a line break would end the line #SBATCH
            problems.append(f"{word!r}: remove the line break or control character.")
        elif name in SET_HERE:
            problems.append(f"{word}: the command sets this option of sbatch. {SET_HERE[name]}")
        elif not equals and remaining and not remaining[0].startswith("-") and "=" not in remaining[0]:
            problems.append(f"{word} {remaining[0]}: write {word}={remaining.pop(0)}.")
        else:
            found.sbatch[name] = value if equals else None
    if problems:
        raise UserError("\n".join(problems))
    return found


def gpus_of(sbatch: dict[str, str | None]) -> int | None:
    """Return the number of GPUs per node in `--gpus-per-node` or `--gres`; None if neither sets a number."""
    for name, pattern in (("gpus-per-node", r"(?:[^:]+:)?(\d+)"), ("gres", r"(?:.*,)?gpu(?::[^:,]+)?:(\d+)(?:,.*)?")):
        if (value := sbatch.get(name)) is not None and (match := re.fullmatch(pattern, value)):
            return int(match[1])
    return None


def cpus_of_rank(sbatch: Mapping[str, str | None]) -> int:
    """Return the CPUs of each rank, by default 1. Raise UserError if `--cpus-per-task` is not a whole number."""
    text = sbatch.get("cpus-per-task") or "1"
    if re.fullmatch("[1-9][0-9]{0,5}", text) is None:
        raise UserError(f"--cpus-per-task={text}: must be a whole number, the CPUs of each rank.")
    return int(text)


def asks_for_gpus(sbatch: dict[str, str | None]) -> bool:
    """Return whether one of the user's options sets the number of GPUs."""
    return any(name in sbatch for name in ("gpus", "gpus-per-node", "gres"))


def check_time(sbatch: dict[str, str | None], warning_s: int) -> None:
    """Raise UserError if `--time` is at most `warning_s` seconds: the stop signal would come at the job's start."""
    text = sbatch.get("time")
    seconds = None if text is None else seconds_of(text)
    if seconds is not None and 0 < seconds <= warning_s:
        raise UserError(
            f"--time={text}: the stop signal comes {warning_s} s before this limit (trainer.preempt_grace_s and 60 s), "
            "so it would come at the start. Set a longer --time, or a shorter trainer.preempt_grace_s."
        )


def seconds_of(text: str) -> int | None:
    """Return the seconds of a time in sbatch's syntax: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. None for other texts."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    return (first * 60 + second) * 60 + third if match[4] is not None else first * 60 + second
