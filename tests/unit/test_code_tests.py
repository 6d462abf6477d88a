"""Verifier `code_tests`: the forms of tests, what passes, and what a hostile program can do."""

import json
import time

import pytest

from rlhf.config.schema.reward import RewardConfig
from rlhf.data.items import Row
from rlhf.data.mbpp import to_row
from rlhf.data.sources import _check_reward_fits
from rlhf.errors import UserError
from rlhf.reward import RewardItem, build_reward
from rlhf.reward.code_tests import code_tests, program_of, read_tests

ADD = "def add(a, b):\n    return a + b\n"
SUMS = "print(sum(map(int, input().split())))\n"


def score(response, tests, seconds=20.0):
    found = code_tests(RewardItem("code", response, tests, {}), seconds)
    return found.score, found.extra["tests_passed"]


def confined(responses, tests, **settings):
    """Score the responses one after another in one real reward process."""
    reward = build_reward(RewardConfig(functions=["code_tests"], num_workers=1, **settings))
    try:
        return [reward.score([RewardItem("code", each, tests, {})])[0] for each in responses]
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (ADD, "assert add(1, 2) == 3"),
        (ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]),
        (ADD, {"fn_name": "add", "inputs": ["1\n2", [3, 4]], "outputs": ["3", [7]]}),
        ("class Solution:\n    def add(self, a, b):\n        return [a, b]\n",
         {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]}),
        ("def pair(a):\n    return a, None\n", [{"fn_name": "pair", "input": "[1]", "output": "[[1], null]"}]),
        ("def bits(a):\n    return format(a, 'b')\n", {"fn_name": "bits", "inputs": [[5]], "outputs": ["101"]}),
        ("def bits(a):\n    return format(a, 'b')\n", {"fn_name": "bits", "inputs": ["5"], "outputs": ['"101"']}),
        (SUMS, {"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]}),
        ("def f():\n    return float('inf')\n", {"fn_name": "f", "inputs": [[]], "outputs": ["Infinity"]}),
        ("def same(a):\n    return a\n", {"fn_name": "same", "inputs": ['"a\u2028b"\n'], "outputs": ['"a\u2028b"']}),
        (SUMS, json.dumps([{"input": "1 2", "output": "3"}])),
        ("if __name__ == '__main__':\n    print(1 / 3)\n", [{"input": "", "output": "0.33333334"}]),
    ],
)  # fmt: skip
def test_a_right_program_passes_tests_of_each_form(program, tests):
    assert score(f"I add them:\n```python\n{program}```\nDone.", tests) == (1.0, 1.0)
    assert score(f"```python\n{program}raise SystemExit(1)\n```", tests) == (0.0, 0.0)


def test_the_last_block_is_the_program_and_a_text_without_a_block_is_one_too():
    assert program_of("```\nfirst\n```\nBetter:\n```python\nlast\n```\n") == "last\n"
    assert program_of("```python\ncut off") == "cut off"
    assert program_of("x = 1") == "x = 1"
    assert program_of("```python\nx = 1```\nDone.") == "x = 1"


@pytest.mark.parametrize(
    "response",
    [
        " ```python\n{}```\nThis adds one.",
        " ```python\n{}```",
        "Solution:\n  ```python\n{}```\n",
        "<answer>```python\n{}```</answer>",
        "</think>```python\n{}```",
        "Here is the code: ```python\n{}```\nIt works.",
        "````python\n{}````",
        "I will write it in a ```python code block.\n\n```python\n{}```",
        "```python\n{}```\nThe code is enclosed in ``` as asked.\nBye",
        "```python\n{}```\n\nThe fences (```) mark the code.\nDone",
    ],
)
def test_fences_after_blanks_tags_and_prose(response):
    program = "def f(x):\n    return x + 1\n"
    assert program_of(response.format(program)) == program


@pytest.mark.parametrize("text", ["`", " ", "\t", "```\n", "x```", " ```"])
def test_a_hostile_response_is_read_in_linear_time(text):
    response = "```\nx" + text * 100_000 + "y\n"
    began = time.process_time()
    program_of(response)
    assert time.process_time() - began < 5, "quadratic time would be minutes"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (
            '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```',
            'def f():\n    """\n    ```\n    f()\n    ```\n    """\n',
        ),
        ("```python\nF = '```'\nx = 1\n```\n", "F = '```'\nx = 1\n"),
        ("Use ```add``` here:\n```python\nx = 1\n```", "x = 1\n"),
        ("1. First\n   ```python\n   def f():\n       return 1\n   ```\n", "def f():\n    return 1\n"),
    ],
    ids=["a docstring", "a text", "prose", "a list"],
)
def test_backticks_within_lines_and_indented_blocks_are_no_fences(response, program):
    assert program_of(response) == program


def test_the_share_of_passed_tests_is_a_metric():
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(2, 2) == 4", "assert sub(1, 1) == 0"]
    assert score(ADD, tests) == (0.0, 0.5)


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "import os\nos.fork()\nos._exit(0)",
        "if 0: \\",
        "print('7')",
        "print('3 0')",
        "print('3.0000000001')",
        "print('x' * 10**6)",
        "def add(a, b:",
        "\ud800",
    ],
)
def test_a_wrong_program_fails(program):
    assert score(program, "assert add(1, 2) == 3") == (0.0, 0.0)
    assert score(program, [{"input": "1 2", "output": "3"}]) == (0.0, 0.0)


def test_an_endless_program_fails_at_the_deadline_and_leaves_no_process():
    started = time.monotonic()
    program = "import subprocess\nsubprocess.Popen(['sleep', '99'])\nwhile True: pass"
    assert score(program, ["assert add(1, 2) == 3"] * 3, seconds=1.0) == (0.0, 0.0)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("tests", "fact"),
    [
        (None, "None"),
        (7, "7"),
        ("42", "no assert"),
        ([], "no tests"),
        ({"inputs": ["1"], "outputs": []}, "equal length"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "a b"}, "not the name of a function"),
        ([{"input": "1"}], "input and output"),
    ],
)
def test_rows_without_tests_are_refused_before_the_run(tests, fact):
    with pytest.raises(ValueError, match=fact):
        read_tests(tests)
    row = Row(2, "train.jsonl, line 3", [], "code", tests, {})
    with pytest.raises(UserError, match=r"line 3: code_tests of .* cannot read the tests"):
        _check_reward_fits(["code_tests"], row)


def test_programs_run_in_confined_reward_processes(tmp_path):
    secret = tmp_path / "mine"
    write = f"open({str(secret)!r}, 'w').write('x')\n"
    connect = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)\n"
    results = confined([SUMS, write + SUMS, connect + SUMS, "while True: pass"], [{"input": "1 2", "output": "3"}])
    assert [result.score for result in results] == [1.0, 0.0, 0.0, 0.0]
    assert [result.extra["tests_late"] for result in results] == [0.0, 0.0, 0.0, 1.0]
    assert all(result.timeouts == result.failures == 0 for result in results)
    assert not secret.exists()


SEGMENT = """
import ctypes as c
memory = c.CDLL(None)
memory.shmat.restype = c.c_void_p
number = memory.shmget(77, 4096, 0o1666)
if number < 0:
    raise OSError
at = memory.shmat(c.c_int(number), None, 0)
"""
"""Opens a segment of shared memory that outlives its program."""
THIEF = f"""
for path in ('../answer', '/dev/shm/answer'):
    try: print(open(path).read())
    except OSError: pass
{SEGMENT}print(c.string_at(at).decode())
"""
HOSTILE = {
    "leaves a process that rewrites later tests": """
import os, time
if not os.fork():
    os.setsid()
    while True:
        for name in os.listdir('..'):
            try: open(f'../{name}/program.py', 'w').write("print('3')")
            except OSError: pass
""",
    "leaves a file for later programs": "open('../answer', 'w').write('zebra')",
    "leaves a file in shared memory": "open('/dev/shm/answer', 'w').write('zebra')",
    "leaves shared memory without a file": f"{SEGMENT}c.memmove(at, b'zebra', 6)",
    "forbids the reward process to write": """
import os, resource
resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (1, 1))
""",
    "closes the temporary folder": "import os\nos.chmod('..', 0)",
    "nests folders": "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')",
    "reads the expected output": """
import os, re
ranges = [re.match('([0-9a-f]+)-([0-9a-f]+) rw', line) for line in open(f'/proc/{os.getppid()}/maps')]
with open(f'/proc/{os.getppid()}/mem', 'rb', 0) as memory:
    for start, end in [(int(m[1], 16), int(m[2], 16)) for m in ranges if m]:
        memory.seek(start)
        if b'zebra' in memory.read(end - start):
            print('zebra')
""",
    "reads the environment": "import os\nprint(os.environ['JUDGE_KEY'])",
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_program_gains_nothing_and_the_next_sample_is_scored_as_before(attack, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "zebra")
    tests = [{"input": "1 2", "output": "zebra"}]
    responses = [HOSTILE[attack], SUMS, THIEF, "print('zebra')"]
    results = confined(responses, tests, pass_env=["JUDGE_KEY"], on_error="stop")
    assert [result.score for result in results] == [0.0, 0.0, 0.0, 1.0]
    assert not any(result.failures for result in results[1:])


OF_THE_REWARD_PROCESS = {
    "mode": "os.chmod('../..', 0o700)",
    "own mode": "os.chmod('..', 0o700)",
    "mode by a descriptor": "os.fchmod(os.open('..', os.O_RDONLY), 0o700)",
    "extended attribute": "os.setxattr('.', 'user.a', b'1')",
    "file limit": "resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (1, 1))",
    "own file limit": "resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99))",
    "scheduler": "os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))",
    "own scheduler": "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))",
    "cores": "os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
    "priority": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
}


@pytest.mark.parametrize("what", OF_THE_REWARD_PROCESS)
def test_a_program_changes_only_its_own_process(what):
    program = f"import os, resource\n{OF_THE_REWARD_PROCESS[what]}\n{SUMS}"
    allowed = what in ("own file limit", "own scheduler")
    assert [each.score for each in confined([program], [{"input": "1 2", "output": "3"}])] == [float(allowed)]


def test_the_order_of_a_set_is_the_same_in_each_process():
    program = "print(list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})[0])"
    scores = {code_tests(RewardItem("code", program, [{"input": "", "output": "a"}], {}), 20.0).score for _ in range(8)}
    assert len(scores) == 1


def test_rows_of_mbpp_show_their_tests_and_are_scored():
    tests = ["assert add(1, 2) == three", "assert add(2, 2) == 4"]
    row = to_row({"text": "Write add.", "test_setup_code": "three = 3", "test_list": tests})
    assert all(test in row["prompt"] for test in tests)
    assert score(f"```python\n{ADD}```", row["answer"]) == (1.0, 1.0)
