"""User files that cannot be imported: a separate process reports them before the ranks import them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlhf.config import RewardConfig
from rlhf.errors import UserError
from rlhf.launch import preflight_import as module
from rlhf.launch.preflight_import import preflight_import
from rlhf.reward.preflight_start import preflight_start

FILES = {
    "good.py": "print('a word')\ndef f(solution_str): return 1.0\n",
    "lacks.py": "import not_there\ndef f(solution_str): ...\n",
    "raises.py": "def f(solution_str): ...\nraise RuntimeError('on import')\n",
    "leaves.py": "import os\nprint('last words', flush=True)\nos._exit(7)\ndef f(solution_str): ...\n",
    "value.py": "f = 3\n",
    "starts.py": "import subprocess\n"
    "left = subprocess.Popen(['sleep', '30'], start_new_session=True)\n"
    "open('left', 'w').write(str(left.pid))\nraise RuntimeError('on import')\ndef f(solution_str): ...\n",
    "waits.py": "import time\ntime.sleep(600)\ndef f(solution_str): ...\n",
}
REASONS = {
    "lacks.py": "cannot be imported: ModuleNotFoundError: No module named 'not_there'. Correct the file.",
    "raises.py": "cannot be imported: RuntimeError: on import. Correct the file.",
    "value.py": "is not a function, but of type int. Name a function.",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def as_estimator(name: str):
    return preflight_import([("algorithm.adv_estimator", f"{name}:f")])


def as_reward(name: str):
    return preflight_start(RewardConfig(functions=["exact_match", f"{name}:f"]))


@pytest.mark.parametrize("trial", [as_estimator, as_reward])
def test_a_valid_file_passes_without_output(folder, trial, capfd):
    with trial("good.py"):
        pass
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("trial", [as_estimator, as_reward])
@pytest.mark.parametrize("name", REASONS)
def test_an_import_error_is_raised_after_the_body(folder, trial, name):
    done = False
    with pytest.raises(UserError) as raised, trial(name):
        done = True
    assert done
    setting = {as_estimator: f"algorithm.adv_estimator={name}", as_reward: f"reward.functions={folder}/{name}"}[trial]
    assert str(raised.value) == f"{setting}:f {REASONS[name]}"


@pytest.mark.parametrize("trial", [as_estimator, as_reward])
def test_a_file_that_exits_is_reported_with_its_last_output(folder, trial):
    words = r"(?s)leaves\.py:f: .*(exit code|exit status) 7.*Correct the file\.\nlast words"
    with pytest.raises(UserError, match=words), trial("leaves.py"):
        pass


def children() -> set[int]:
    """Return this process' children; some may be from other tests and end during the test."""
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("trial", [as_estimator, as_reward])
def test_an_error_in_the_body_does_not_wait_for_the_import(folder, trial):
    start, before = time.monotonic(), children()
    with pytest.raises(ValueError, match="of the body"), trial("waits.py"):
        raise ValueError("of the body")
    assert time.monotonic() - start < 120
    assert children() <= before


def test_a_slow_import_is_left_to_the_ranks_but_a_slow_reward_file_is_rejected(folder, monkeypatch):
    monkeypatch.setattr(module, "DEADLINE_S", 0.2)
    with as_estimator("waits.py"):
        pass
    monkeypatch.setattr("rlhf.reward.scoring_handle.START_TIMEOUT_S", 0.4)
    late = r"reward\.functions=waits\.py:f: .* was not ready within 0 s\."
    with pytest.raises(UserError, match=late), as_reward("waits.py"):
        pass


def test_no_process_starts_without_user_files():
    ours = RewardConfig(functions=["exact_match"])
    before = children()
    with preflight_import([]), preflight_start(ours), preflight_start(None):
        assert children() <= before


def test_a_process_left_by_a_user_file_does_not_block_the_preflight(folder):
    start = time.monotonic()
    with pytest.raises(UserError, match="on import"), as_estimator("starts.py"):
        pass
    assert time.monotonic() - start < 120
    os.kill(int((folder / "left").read_text()), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends it")
def test_the_import_process_ends_with_its_parent(folder):
    body = "open(f'/proc/self/task/{os.getpid()}/children').read()"
    code = (
        "import os, time; from rlhf.launch.preflight_import import preflight_import\n"
        f"with preflight_import([('s', 'waits.py:f')]): print({body}, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    left, end = Path(f"/proc/{child}"), time.monotonic() + 120
    while left.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not left.exists()
