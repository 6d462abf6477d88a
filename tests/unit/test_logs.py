"""Log of a rank: libraries' messages and progress bars are off, although the libraries were imported before."""

import io
import logging
import os
import subprocess
import sys
import warnings

import pytest

from rlhf import worker
from rlhf.config import Config
from rlhf.errors import EXIT_CRASHED, UserError
from rlhf.ranks.logs import configure_logging, restored_logging
from tests.support.rank_scripts import local_starter

SCRIPT = """
import sys
from transformers.utils import logging
from huggingface_hub.utils import are_progress_bars_disabled
from rlhf.ranks.logs import configure_logging
from tests.support.rank_scripts import local_starter
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
def test_the_logging_of_a_caller_is_restored(monkeypatch, captured):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setattr(logging.getLogger("httpx"), "level", logging.DEBUG)

    def state():
        root = logging.getLogger()
        levels = [logging.getLogger(name).level for name in ("root", "httpx", "urllib3")]
        return root.handlers[:], levels, warnings.showwarning, dict(os.environ)

    logging.captureWarnings(captured)
    try:
        before = state()
        with restored_logging():
            configure_logging()
            assert state() != before
        assert state() == before
    finally:
        logging.captureWarnings(False)


def test_a_thread_in_a_process_that_ignores_sigchld_is_an_error():
    code = f"""
import signal, threading
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from {local_starter.__module__} import local_starter
from {Config.__module__} import Config
from {UserError.__module__} import UserError
def start():
    try:
        with local_starter(Config(), []):
            print("started")
    except UserError as error:
        print(error)
threading.Thread(target=start).start()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "signal.signal(signal.SIGCHLD, signal.SIG_DFL) in its main thread" in ran.stdout


def _of_unbuffered_python(file: io.FileIO) -> io.TextIOWrapper:
    """Return a stream like stdout and stderr under PYTHONUNBUFFERED=1."""
    return io.TextIOWrapper(file, write_through=True)


def test_a_rank_prints_each_line_in_one_piece(tmp_path, monkeypatch):
    """Ranks share a pipe: a line break that is written separately could follow another rank's line."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    reader, writer = os.pipe2(os.O_DIRECT)  # one read takes what one write has written
    with open(reader, "rb", buffering=0) as read, open(writer, "wb", buffering=0) as pipe:  # noqa: PTH123
        streams = {name: _of_unbuffered_python(pipe) for name in ("stdout", "stderr")}
        with monkeypatch.context() as patch, restored_logging():
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            assert worker.main(tmp_path) == EXIT_CRASHED, "there is no resolved configuration"
            for stream in streams.values():
                print("one line", file=stream)
        for stream in streams.values():
            stream.detach()
        os.write(writer, b"end")
        pieces = list(iter(lambda: read.read(1 << 16), b"end"))
    assert pieces[-2:] == [b"one line\n"] * 2
