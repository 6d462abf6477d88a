"""Verifier `code_tests`: runs the program in a response against its row's tests, each in its own Python process."""

import contextlib
import json
import math
import os
import re
import resource
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.reward import kernel
from rlhf.reward.confinement import restrict_to
from rlhf.reward.scores import RewardItem, Score

SHARE = 0.8
"""Share of `reward.timeout_s` that all tests of a sample have together. A test that has not ended by then fails, so
an endless loop is a wrong answer, not a timeout of the verifier."""
FORMS = (
    "Python code with assert, a list of such texts (MBPP's test_list), {inputs: [...], outputs: [...]} with an "
    "optional fn_name (APPS, TACO), a list of {input, output}, or one of these as JSON"
)
_FENCED = re.compile(
    r"^([ \t]*+)(?:```+[^\n`]*|[^\n`]++```+[\w+#.-]*[ \t]*\r?)\n(.*?)"
    r"(?:^(?:\1)? {0,3}```+|(?<=[^\s`])```+[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""Matches a fenced block of code.

The first fence is at the start of a line, or after a line's text; only a language's name may follow it there. The last
fence is at the start of a line, indented by at most three spaces, or by three more than the first fence; or it is at
the end of a line. Other backticks are parts of the program or of prose. Possessive quantifiers keep the time linear."""
_LONGEST_OUTPUT = 10 << 20
_PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables of this process that programs get."""
_LASTING_CALLS = (
    # Objects of the kernel that outlive a program. A later program could read them.
    *("shmget", "semget", "msgget", "mq_open"),
    # Landlock allows programs to change the modes of this process's folders, and of all files of an ordinary user.
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("setpriority", "ioprio_set"),
)
_OWN_PROCESS = ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
"""Calls that can change every process of the user. A program may make them only with first argument 0: its own process.

Otherwise a program could use `prlimit64` to forbid this process to write the files of the next sample."""
_CALL = """
import json as _json
_target = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
assert _json.loads(_json.dumps(_target(*_json.loads({arguments!r})))) in _json.loads({expected!r})
"""


@dataclass(frozen=True)
class CodeTest:
    """A test of a program: code that runs after the program, or the output that the program prints for an input."""

    code: str | None = None
    stdin: str = ""
    output: str = ""


def read_tests(ground_truth: Any) -> list[CodeTest]:
    """Return the tests of a row's reference answer, which has one of `FORMS`. Raise ValueError for any other value."""
    given = _from_json(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(given, Mapping):
        inputs, outputs = given.get("inputs"), given.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are not two lists of equal length")
        given = [
            {"input": i, "output": o, "fn_name": given.get("fn_name")} for i, o in zip(inputs, outputs, strict=True)
        ]
    found = [_test(each) for each in (given if isinstance(given, list) else [given])]
    if not found:
        raise ValueError("there are no tests")
    return found


def _from_json(text: str) -> Any:
    """Parse `text` as JSON and return the list or mapping; return `text` itself if it is neither."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, list | dict) else text


def _test(given: Any) -> CodeTest:
    if isinstance(given, str):
        if "assert" not in given:
            raise ValueError(f"{given[:80]!r} has no assert")
        return CodeTest(code=given)
    if not isinstance(given, Mapping) or "input" not in given or "output" not in given:
        raise ValueError(f"{str(given)[:80]!r} is neither code nor a mapping with input and output")
    name, stdin, output = given.get("fn_name"), given["input"], given["output"]
    if name is None:
        return CodeTest(stdin=_lines(stdin), output=_lines(output))
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"fn_name={name!r} is not the name of a function")
    # Split only at line feeds: JSON texts may contain the other line breaks of `splitlines`.
    arguments = [json.loads(line) for line in stdin.split("\n") if line.strip()] if isinstance(stdin, str) else stdin
    expected = [output]
    if isinstance(output, str):
        with contextlib.suppress(ValueError):
            # If `stdin` is JSON text, so is the output. If `stdin` is a list, "101" may be the number or the string.
            expected = [json.loads(output), *([] if isinstance(stdin, str) else [output])]
    # APPS stores some results in a list of one element.
    expected += [each[0] for each in expected if isinstance(each, list) and len(each) == 1]
    return CodeTest(code=_CALL.format(name=name, arguments=json.dumps(arguments), expected=json.dumps(expected)))


def _lines(given: Any) -> str:
    """Return a program's input or output as text; APPS stores some as lists of lines."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def program_of(response: str) -> str:
    """Return the last fenced block of code in a response, or the whole response if it has none."""
    blocks = _FENCED.findall(response)
    if not blocks:
        return response
    indent, program = blocks[-1]
    lines = program.split("\n")
    indented = all(line.startswith(indent) for line in lines if line.strip())
    return "\n".join(line.removeprefix(indent) for line in lines) if indented else program


def code_tests(item: RewardItem, seconds: float) -> Score:
    """Return 1 if the response's program passes all tests within `seconds`, else 0.

    `tests_passed` is the share of tests that passed; `tests_late` is 1 if the time was over before all tests had ended,
    which depends on the machine's load. Programs have the confinement of this process, but neither its environment nor
    its memory. A program can still cheat a test in code, by changing Python or reading its own file, and any
    test by reading a data file that this process may read.
    """
    deadline = time.monotonic() + seconds
    tests, program = read_tests(item.ground_truth), program_of(item.answer)
    passed = sum(_passes(program, test, deadline) for test in tests)
    late = time.monotonic() >= deadline
    return Score(float(passed == len(tests)), {"tests_passed": passed / len(tests), "tests_late": float(late)})


def _passes(program: str, test: CodeTest, deadline: float) -> bool:
    done = secrets.token_hex(16)
    # A program that ends early must not pass, so the last line of a test's code prints a random word.
    text = program if test.code is None else f"{program}\n\n{test.code}\nprint({done!r})\n"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        path = Path(folder, "program.py")
        path.write_text(text, encoding="utf-8", errors="replace")
        if not _exits_with_zero(path, test.stdin, printed, deadline):
            return False
        printed.seek(0)
        output = printed.read(_LONGEST_OUTPUT).decode(errors="replace")
    return _equal(output, test.output) if test.code is None else output.rstrip().endswith(done)


def _confine(folder: str) -> None:
    """Keep a program from changing the tests of other samples.

    The program can start no process or thread, writes only to its own folder, and leaves nothing in the kernel.
    """
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if sys.platform == "linux":
        restrict_to([folder], abstract_sockets=False)
        with contextlib.suppress(OSError):  # this process has already warned of a machine without seccomp
            kernel.forbid_calls(_LASTING_CALLS, unless_first=dict.fromkeys(_OWN_PROCESS, (0,)))


def _exits_with_zero(path: Path, stdin: str, printed: Any, deadline: float) -> bool:
    """Run a program in a session of its own. Kill the session when the program has ended or the time is over."""
    process = subprocess.Popen(
        # -P -s with these variables alone isolate as -I does, but -I would ignore PYTHONHASHSEED (promise 7).
        [sys.executable, "-P", "-s", path.name],
        cwd=path.parent,
        env={name: value for name, value in os.environ.items() if name in _PASSED}
        | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        | dict.fromkeys(("HOME", "TMPDIR"), str(path.parent)),
        preexec_fn=partial(_confine, str(path.parent)),
        stdin=subprocess.PIPE,
        stdout=printed,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.communicate(stdin.encode(errors="replace"), timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all processes of the session have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _open_again(path.parent.parent)
    return process.returncode == 0


def _open_again(folder: Path) -> None:
    """Restore this process's rights on its temporary folder. Landlock does not keep a program from calling chmod."""
    if folder.stat().st_mode & stat.S_IRWXU != stat.S_IRWXU:
        folder.chmod(stat.S_IRWXU)


def _equal(output: str, expected: str) -> bool:
    """Return whether two outputs have the same words. Numbers may differ by a relative 1e-6, as online judges allow."""
    ours, theirs = output.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not {".", "e", "E"} & set(expected):  # whole numbers and words are exact
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False
