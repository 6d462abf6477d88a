"""Runs checks of a node side by side, with one deadline for all of them."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf.errors import UserError

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Outcome:
    """One fact that a check found. The text of a warning or an error ends with the remedy."""

    level: Level
    text: str


@dataclass(frozen=True)
class CheckResult:
    """An outcome with the name of its check, and the node on which the check ran."""

    level: Level
    check: str
    text: str
    node: str


Check = Callable[[], Iterable[Outcome]]


def ok(text: str) -> Outcome:
    return Outcome("ok", text)


def warning(text: str) -> Outcome:
    return Outcome("warning", text)


def error(text: str) -> Outcome:
    return Outcome("error", text)


def run_checks(checks: Mapping[str, Check], node: str, deadline_s: float) -> list[CheckResult]:
    """Run all checks in threads, and return their results in the order of `checks`.

    For a check that raises, or that has not ended after `deadline_s` seconds, the result is an error. This function
    abandons the thread of a late check, because a system call on a broken disk may never return.
    """
    outcomes: dict[str, list[Outcome]] = {}
    threads = {}
    for name, check in checks.items():
        threads[name] = threading.Thread(target=_run, args=(name, check, outcomes), name=name, daemon=True)
        threads[name].start()
    end = time.monotonic() + deadline_s
    for thread in threads.values():
        thread.join(max(0.0, end - time.monotonic()))
    late = [error(f"not finished after {deadline_s:g} s. A device or a file system may hang: see dmesg.")]
    return [CheckResult(each.level, name, each.text, node) for name in checks for each in outcomes.get(name, late)]


def _run(name: str, check: Check, outcomes: dict[str, list[Outcome]]) -> None:
    try:
        outcomes[name] = list(check())
    except UserError as problem:
        outcomes[name] = [error(one_line(problem))]
    except Exception as problem:  # a failed check must not end the other checks
        outcomes[name] = [error(f"the check failed: {type(problem).__name__}: {one_line(problem)}")]


def one_line(problem: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(problem).split())


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 rank` and `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
