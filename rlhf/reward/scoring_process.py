"""Runs in a reward process: reads one JSON line with samples, writes one JSON line with their scores.

`python -m rlhf.reward.scoring_process VERIFIER PARENT_PID CONFINEMENT TIMEOUT_S`, where VERIFIER is `math_verify`,
`reasoning_gym`, `code_tests` or `/path/to/file.py:name`, and CONFINEMENT a `Confinement` as JSON. The first input line
is `reward.kwargs`, because all users of the machine can read a command line, and its length is limited. The first
output line reports that the process is ready and how to send samples, or an error. Each later output line answers one
input line, with an entry for each sample or one error for all samples.
"""

import dataclasses
import errno
import json
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlhf import typed_json
from rlhf.config.user_functions import load_function
from rlhf.errors import UserError
from rlhf.ranks.logs import write_whole_lines
from rlhf.reward import verifiers
from rlhf.reward.calls import FunctionCall
from rlhf.reward.code_tests import SHARE, code_tests
from rlhf.reward.confinement import Confinement, CpuTime, confine
from rlhf.reward.kernel import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, prctl
from rlhf.reward.request_format import RequestFormat
from rlhf.reward.scores import NUMBER, RewardItem, Score
from rlhf.reward.settings import SETTING

_LONGEST = 50_000
"""An error in a reply has at most this many characters, because a reply has at most 1 MiB."""

_CONFINED = (
    "(Reward processes can write only to HOME and TMPDIR, and have no network and few of your environment variables. "
    "To allow more, set reward.writable, reward.network or reward.pass_env.)"
)
_DENIED = (errno.EPERM, errno.EACCES, errno.EROFS)

Scoring = Callable[[Sequence[RewardItem]], list[dict[str, Any]]]
"""Returns an entry of the reply for each item."""


def main(verifier: str, parent_pid: int, confinement: Confinement, timeout_s: float) -> None:
    _die_with(parent_pid)
    confined = confine(confinement)
    failure = partial(_failure, network=confinement.network)
    requests, replies = _reserve_pipes()
    if not (first := requests.readline()):
        return
    try:
        kwargs = json.loads(first)
        score, request_format = _load(verifier, kwargs, timeout_s, failure)
        _send(replies, dataclasses.asdict(confined) | {"request_format": dataclasses.asdict(request_format)})
    # Catch SystemExit, too: a script without a __main__ guard must not look like a process that died.
    except BaseException as error:
        _send(replies, dataclasses.asdict(confined) | failure(error))
        return
    cpu_time = CpuTime(timeout_s)
    for line in requests:
        request = typed_json.loads(line)
        number, items = request[NUMBER], [RewardItem(**fields) for fields in request["items"]]
        cpu_time.renew(len(items))
        try:
            reply: dict[str, Any] = {"scores": score(items)}
        except BaseException as error:
            reply = failure(error)
        _send(replies, reply | {NUMBER: number})


def _die_with(parent_pid: int) -> None:
    # A reward function in an endless loop never sees that its input has ended. Linux kills this process when the
    # parent's thread that started it ends.
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone")


def _reserve_pipes() -> tuple[Any, int]:
    """Reserve the protocol's pipes: the user's code prints to stderr and reads an empty stdin."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    write_whole_lines()
    return requests, replies


def _send(replies: int, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


def _failure(error: BaseException, network: bool) -> dict[str, Any]:
    hint = f"\n{_CONFINED}" if _caused_by_confinement(error, network) else ""
    return {
        "error": str(error)[-_LONGEST:] + hint,
        "user": isinstance(error, UserError),
        "limit": isinstance(error, MemoryError),
        "traceback": _traceback(error)[-_LONGEST:] + hint,
    }


def _traceback(error: BaseException) -> str:
    """Return the traceback from the first frame of users' code on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, FunctionCall.__module__):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__)).rstrip()


def _caused_by_confinement(error: BaseException | None, network: bool) -> bool:
    """Return whether a missing right or environment variable caused `error` or an error in its chain.

    Without the right to use the `network`, host names cannot be resolved.
    """
    while error is not None:
        if isinstance(error, socket.gaierror) and not network:
            return True
        if isinstance(error, OSError) and error.errno in _DENIED:
            return True
        if isinstance(error, KeyError) and error.__traceback__ is not None:
            *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
            if innermost.f_globals.get("__name__") == "os":  # os.environ raised the error
                return True
        error = error.__cause__ or error.__context__
    return False


def _load(
    verifier: str, kwargs: dict[str, Any], timeout_s: float, failure: Callable[[BaseException], dict[str, Any]]
) -> tuple[Scoring, RequestFormat]:
    if verifier == "math_verify":
        # Hide math_verify's warning that its own timeouts are off: the pool's deadline replaces them.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        verifiers.math_verify(RewardItem("", "\\boxed{1}", "1", {}, []))
        return _each(verifiers.math_verify), RequestFormat()
    if verifier == "reasoning_gym":
        import reasoning_gym  # noqa: F401

        return _each(verifiers.reasoning_gym), RequestFormat()
    if verifier == "code_tests":
        if sys.platform == "linux":
            prctl(PR_SET_DUMPABLE, 0)  # programs must not read the expected outputs in this process' memory
        return _each(partial(code_tests, seconds=SHARE * timeout_s)), RequestFormat()
    setting = f"{SETTING}={verifier}"
    call = FunctionCall(setting, load_function(SETTING, verifier, may_be_async=True), kwargs, timeout_s, failure)
    return call, RequestFormat.for_function(call.signature)


def _each(verifier: Callable[[RewardItem], Score]) -> Scoring:
    return lambda items: [dataclasses.asdict(verifier(item)) for item in items]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Confinement(**json.loads(sys.argv[3])), float(sys.argv[4]))
