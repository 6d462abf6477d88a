"""The limit of open files, tested in separate processes, which have their own limits."""

import subprocess
import sys

import pytest

from rlhf.errors import EXIT_USER_ERROR

COMMANDS = {
    "trainer": "from rlhf.train import main; main(['--cfg'])",
    "server": "from rlhf.rollout.servers.__main__ import main; main()",
}
START = """
import contextlib, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
with contextlib.suppress(SystemExit):
    {command}
child = [sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"]
print("own", resource.getrlimit(resource.RLIMIT_NOFILE), "child", subprocess.check_output(child, text=True))
"""


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_commands_raise_the_limit_of_open_files_to_the_hard_limit(command):
    program = [sys.executable, "-c", START.format(command=command)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-2:] == ["own (4096, 4096) child 4096", ""]


def test_a_start_with_closed_standard_streams_works():
    command = [sys.executable, "-m", "rlhf.train", "trainer.nprocs=8"]
    done = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], check=False)
    assert done.returncode == EXIT_USER_ERROR
