"""Log of a rank: the libraries' chatter and progress bars are off though the rank has imported them before."""

import logging
import os
import subprocess
import sys
import warnings

import pytest

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.launch.rank_starter import RankStarter
from rlhf.ranks.logs import configure_logging, logging_put_back

SCRIPT = """
import sys
from transformers.utils import logging
from huggingface_hub.utils import are_progress_bars_disabled
from rlhf.ranks.logs import configure_logging
configure_logging(int(sys.argv[1]))
print(logging.get_verbosity() == logging.ERROR, logging.is_progress_bar_enabled(), are_progress_bars_disabled())
"""


@pytest.mark.parametrize(("rank", "bars"), [(0, "True False"), (1, "False True")])
def test_a_rank_is_quiet(monkeypatch, rank, bars):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(rank)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", *bars.split()]


@pytest.mark.parametrize("captured", [True, False])
def test_a_caller_has_its_own_logging_back(monkeypatch, captured):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setattr(logging.getLogger("httpx"), "level", logging.DEBUG)

    def state():
        root = logging.getLogger()
        levels = [logging.getLogger(name).level for name in ("root", "httpx", "urllib3")]
        return root.handlers[:], levels, warnings.showwarning, dict(os.environ)

    logging.captureWarnings(captured)
    try:
        before = state()
        with logging_put_back():
            configure_logging()
            assert state() != before
        assert state() == before
    finally:
        logging.captureWarnings(False)


def test_a_thread_of_a_process_that_ignores_its_children_is_told():
    code = f"""
import signal, threading
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from {RankStarter.__module__} import RankStarter
from {Config.__module__} import Config
from {UserError.__module__} import UserError
def start():
    try:
        with RankStarter(Config()):
            print("started")
    except UserError as error:
        print(error)
threading.Thread(target=start).start()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "signal.signal(signal.SIGCHLD, signal.SIG_DFL) in its main thread" in ran.stdout
