"""Output of a run: without control characters and secrets, in a bounded log that opens late, through ranks' pipes."""

import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf.config.redaction import Redaction
from rlhf.errors import UserError
from rlhf.launch.local.rank_output import RankOutput
from rlhf.ranks.progress_pipe import PROGRESS_FD, ProgressDisplay, ProgressPipe
from rlhf.storage.log_file import LogFile
from rlhf.tracking import unread_output
from rlhf.tracking.run_output import OutputHandler, RunOutput

SECRETS = {"HF_TOKEN": "hush-hush-hush", "PIN_KEY": "1234", "EDITOR": "vim-the-editor"}


@pytest.fixture
def output():
    return RunOutput("plain", Redaction(SECRETS))


def test_secrets_are_redacted_anywhere_in_a_line():
    redact = Redaction(SECRETS)
    assert redact("a hush-hush-hush b, hf_abcdefghijklmnopqrst") == "a REDACTED b, REDACTED"
    assert redact("get http://me:pa55@host:80/x") == "get http://REDACTED@host:80/x"
    assert redact("1234 of vim-the-editor at http://host:80/x") == "1234 of vim-the-editor at http://host:80/x"


def test_nothing_is_written_before_the_log_is_opened_and_then_all_of_it(tmp_path, output, capsys):
    path = tmp_path / "new" / "run.log"
    with output:
        output.line("early \x1b]0;title\x07 with hush-\x1b[36mhush\x1b[0m-hush")
        assert not path.parent.exists()
        output.open_log(path)
        output.line("two\n\tlines \x1b[31mred\x1b[0m")
    with RunOutput("plain", Redaction({})) as again:
        again.open_log(path)
        again.line("another start")
    expected = "early \\x1b]0;title\\x07 with REDACTED\ntwo\n        lines red\n"
    assert path.read_text() == f"{expected}another start\n"
    assert capsys.readouterr().err == f"{expected}another start\n"


def test_the_error_that_ends_a_run_is_in_its_log(tmp_path, output, capsys):
    def fail() -> None:
        with output:
            output.open_log(tmp_path / "run.log")
            raise UserError("model.path=x: there is no such folder.")

    with pytest.raises(UserError):
        fail()
    assert (tmp_path / "run.log").read_text() == "model.path=x: there is no such folder.\n"
    assert capsys.readouterr().err == "", "the command says it"


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path, output, capsys):
    (tmp_path / "file").touch()
    with output:
        output.open_log(tmp_path / "file" / "run.log")
        output.line("goes on")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("The log file cannot be opened: [Errno ")
    assert second == "goes on"


def test_a_log_is_bounded_and_its_lines_are_never_torn(tmp_path):
    path = tmp_path / "run.log"
    one, other = LogFile(path, 100), LogFile(path, 100)
    for number in range(40):
        (one if number % 3 else other).write(f"line {number:02d}\n")
    one.close()
    other.close()
    sizes = [file.stat().st_size for file in (path, path.with_name("run.log.1"))]
    assert max(sizes) <= 100
    lines = path.with_name("run.log.1").read_text().splitlines() + path.read_text().splitlines()
    assert lines[-1] == "line 39"
    assert all(len(line) == 7 for line in lines)
    assert len(lines) > 12


def test_lines_of_several_threads_are_all_in_a_log_that_outgrows_its_size(tmp_path, output, capsys, monkeypatch):
    class SlowToClose(LogFile):
        def close(self) -> None:
            super().close()
            time.sleep(0.002)  # for the others to write meanwhile

    monkeypatch.setattr("rlhf.tracking.run_output.LogFile", lambda path: SlowToClose(path, 3000))

    def write(name: str) -> None:
        for number in range(200):
            output.only_log(f"{name} {number}")

    with output:
        output.open_log(tmp_path / "run.log")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write, "abcd"))
    assert capsys.readouterr().err == "", "the log was written to its end"
    lines = [line for name in ("run.log.1", "run.log") for line in (tmp_path / name).read_text().splitlines()]
    assert sorted(lines) == sorted(f"{name} {number}" for name in "abcd" for number in range(200))


def test_a_closed_pager_does_not_end_the_run(tmp_path):
    code = """
import sys
from rlhf.config.redaction import Redaction
from rlhf.tracking.run_output import RunOutput
from pathlib import Path
with RunOutput(sys.argv[2], Redaction({})) as output:
    output.open_log(Path(sys.argv[1]))
    output.begin_bar()
    output.line("first")
    sys.stdin.read()  # until nobody reads any more
    output.line("second", sys.stdout)
    output.line("third")
"""
    for mode in ("plain", "live"):
        path = tmp_path / mode
        process = subprocess.Popen(
            [sys.executable, "-c", code, path, mode],
            stdin=subprocess.PIPE,
            stdout=(pipe := os.pipe())[1],
            stderr=pipe[1],
        )
        os.close(pipe[1])
        os.read(pipe[0], 1)
        os.close(pipe[0])
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0
        assert path.read_text() == "first\nsecond\nthird\n"


def test_output_of_ranks_is_passed_on_in_whole_lines(output, capsys):
    with output, RankOutput(output) as of_ranks:
        os.write(of_ranks.stdout, b"one\ntw")
        os.write(of_ranks.stderr, b" 10%|\r 50%|\r100%|\nto stderr\xff\n")
        of_ranks.drain()
        os.write(of_ranks.stdout, b"three\n" + b"x" * 70_000)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["one", "tw", "three", "x" * 70_000]
    assert printed.err.splitlines() == ["100%|", "to stderr\\xff"]


def test_the_progress_of_a_download_is_shown(output):
    with output, RankOutput(output) as of_ranks:
        of_ranks.phase("loading")
        os.write(of_ranks.stderr, b"\rmodel: 10%\rmodel: 50%")
        of_ranks.drain()
        assert output.progress._note in ("model: 10%", "model: 50%")


def test_progress_messages_arrive_and_invalid_messages_are_ignored(output, monkeypatch):
    with output, RankOutput(output) as of_ranks:
        assert of_ranks.variables == {PROGRESS_FD: str(of_ranks.progress_fd)}
        monkeypatch.setenv(PROGRESS_FD, str(of_ranks.progress_fd))
        sent = ProgressPipe.from_environment()
        sent.start(2, 9)
        for nonsense in (b"{}\n", b"\xff\n", b'["start", "x", 1]\n', json.dumps(["update"]).encode() + b"\n"):
            os.write(of_ranks.progress_fd, nonsense)
        for text in (
            "[" * 60_000,
            '["update", 3, {"reward/mean": null}]',
            f'["update", 3, {{"reward/mean": {"9" * 400}}}]',
            f'["start", 1, {"9" * 400}]',
            '["start", true, 3]',
            '["phase", 0, 3, "x", 1, -8]',
        ):
            os.write(of_ranks.progress_fd, f"{text}\n".encode())
            of_ranks.drain()
        sent.phase(0, 3, "gener\x1b[2Jating", 5, 8)
        of_ranks.drain()
        assert output.progress.phase_text == "gener\\x1b[2Jating 5/8"
        sent.phase(0, 3, "generating", 5, 8)
        of_ranks.drain()
        assert output.progress.started
        assert output.progress.phase_text == "generating 5/8"
    sent.phase(0, 3, "generating", 6, 8)  # nobody is there any more
    monkeypatch.delenv(PROGRESS_FD)
    assert type(ProgressPipe.from_environment()) is ProgressDisplay


def test_a_rank_does_not_wait_for_a_supervisor_that_does_not_read(tmp_path):
    reading, writing = os.pipe()
    sent = ProgressPipe(writing)
    for done in range(10_000):
        sent.phase(0, 1, "generating", done, 10_000)
    os.close(reading)
    sent.phase(0, 1, "generating", 1, 1)
    os.close(writing)


def test_log_records_are_lines(output, capsys):
    logger = logging.getLogger("rlhf.test_run_output")
    handler = OutputHandler(output)
    logger.addHandler(handler)
    try:
        logger.warning("says %s", "\x07")
    finally:
        logger.removeHandler(handler)
    assert capsys.readouterr().err == "says \\x07\n"


def test_a_pipe_that_nobody_reads_holds_up_nothing(tmp_path, output, monkeypatch):
    """A paused pager loses lines after a deadline, but the log has them. Then a line reports the loss."""
    monkeypatch.setattr(unread_output, "READER_TIMEOUT_S", 0.3)
    read, write = os.pipe()
    lines = [f"line {i} {'x' * 90}" for i in range(2000)]
    with os.fdopen(write, "w") as pager, output:
        monkeypatch.setattr(sys, "stderr", pager)
        output.open_log(tmp_path / "run.log")
        begin = time.monotonic()
        for line in lines:
            output.line(line)
        assert time.monotonic() - begin < 30
        before = os.read(read, 1 << 20).decode()
        output.line("after")
        after = os.read(read, 1 << 20).decode()
    os.close(read)
    got = before.splitlines()
    assert got[:-1] == lines[: len(got) - 1]
    notice, last = after.splitlines()[-2:]
    missed = len(lines) - before.count("\n")
    assert notice == f"(lines that were not read in time, see run.log: {missed:,})"
    assert last == "after"
    log = (tmp_path / "run.log").read_text().splitlines()
    assert [line for line in log if line in lines] == lines
    assert sum("The output of this command has not been read" in line for line in log) == 1
