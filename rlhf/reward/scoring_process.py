"""Reward process, the end that scores: one JSON line in, one JSON line out.

`python -m rlhf.reward.scoring_process VERIFIER PARENT_PID CONFINEMENT TIMEOUT_S`, where VERIFIER is `math_verify`,
`reasoning_gym` or `/path/to/file.py:name`, and CONFINEMENT a `Confinement` as JSON. The first line out says ready, or
why not.
"""

import dataclasses
import errno
import inspect
import json
import logging
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from typing import Any

from rlhf.errors import UserError
from rlhf.reward import verifiers
from rlhf.reward.confinement import Confinement, CpuTime, confine
from rlhf.reward.function import KEYWORDS, SETTING
from rlhf.reward.kernel import PR_SET_PDEATHSIG, prctl
from rlhf.reward.scores import NUMBER, RewardItem, Score
from rlhf.user_functions import load_function

_LONGEST = 50_000
"""Characters of an error that are told; a reply has at most 1 MiB."""

_CONFINED = (
    "(Reward processes write to HOME and TMPDIR only, and have no network and none of your environment variables: "
    "reward.writable, reward.network and reward.pass_env give a function what it needs.)"
)
_REFUSED = (errno.EPERM, errno.EACCES, errno.EROFS)

Verifier = Callable[[RewardItem], Score]


def main(verifier: str, parent_pid: int, confinement: Confinement, timeout_s: float) -> None:
    """Serve until the parent closes the pipe."""
    _die_with(parent_pid)
    confined = confine(confinement)
    requests, replies = _take_pipes()
    try:
        score = _load(verifier)
        _send(replies, dataclasses.asdict(confined))
    # Also SystemExit: a script without a __main__ guard must not look like a process that died by itself.
    except BaseException as error:
        _send(replies, dataclasses.asdict(confined) | _failure(error))
        return
    cpu_time = CpuTime(timeout_s)
    for line in requests:
        cpu_time.renew()
        question = json.loads(line)
        number = question.pop(NUMBER)
        try:
            reply = dataclasses.asdict(score(RewardItem(**question, messages=[])))
        except BaseException as error:
            reply = _failure(error)
        _send(replies, reply | {NUMBER: number})


def _die_with(parent_pid: int) -> None:
    # A busy loop never reads the end of its input; Linux kills the process with the parent's thread that started it.
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone")


def _take_pipes() -> tuple[Any, int]:
    """Keep the protocol's pipes for ourselves: what the user's code prints goes to stderr, and it reads nothing."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


def _send(replies: int, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


def _failure(error: BaseException) -> dict[str, Any]:
    hint = f"\n{_CONFINED}" if _meets_confinement(error) else ""
    return {
        "error": str(error)[-_LONGEST:] + hint,
        "user": isinstance(error, UserError),
        "limit": isinstance(error, MemoryError),
        "traceback": traceback.format_exc()[-_LONGEST:] + hint,
    }


def _meets_confinement(error: BaseException | None) -> bool:
    """Whether a right or an environment variable was missing, also as what another error was raised from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REFUSED:
            return True
        if isinstance(error, KeyError) and error.__traceback__ is not None:
            *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
            if innermost.f_globals.get("__name__") == "os":  # os.environ
                return True
        error = error.__cause__ or error.__context__
    return False


def _load(verifier: str) -> Verifier:
    if verifier == "math_verify":
        # It warns once that its own timeouts are off; the pool's deadline is the timeout.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        verifiers.math_verify(RewardItem("", "\\boxed{1}", "1", {}, []))
        return verifiers.math_verify
    if verifier == "reasoning_gym":
        import reasoning_gym  # noqa: F401

        return verifiers.reasoning_gym
    return _user_function(verifier)


def _user_function(spec: str) -> Verifier:
    function = load_function(SETTING, spec)
    _check_call(function, spec)

    def score(item: RewardItem) -> Score:
        value = function(
            data_source=item.data_source,
            solution_str=item.response,
            ground_truth=item.ground_truth,
            extra_info=item.extra_info,
        )
        return as_score(value, spec)

    return score


def _check_call(function: Any, spec: str) -> None:
    """What the early check of the file cannot see: names that are assigned, imported or made."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(KEYWORDS))
    except TypeError as error:
        raise UserError(
            f"{SETTING}={spec} cannot be called with {', '.join(KEYWORDS)}: {error}. Correct its parameters."
        ) from error
    except ValueError:
        pass  # something built in, without a signature to look at


def as_score(value: Any, spec: str) -> Score:
    """Score from what the user's function returned; UserError unless it is a finite number or a dict of them with
    `score`."""
    numbers = value if isinstance(value, dict) else {"score": value}
    for key, number in numbers.items():
        if not isinstance(number, Real) or not math.isfinite(number):
            what = f"{key}={number!r}" if isinstance(value, dict) else repr(value)
            raise UserError(
                f"{SETTING}={spec} returned {what} ({type(number).__name__}). Return a finite number, or a "
                f"dict of them with 'score'."
            )
    if "score" not in numbers:
        raise UserError(f"{SETTING}={spec} returned a dict without 'score': {value!r}. Add it.")
    extra = {str(key): float(number) for key, number in numbers.items() if key != "score"}
    return Score(float(numbers["score"]), extra)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Confinement(**json.loads(sys.argv[3])), float(sys.argv[4]))
