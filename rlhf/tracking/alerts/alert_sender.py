"""Starts the process that sends a run's alerts, and ends it in bounded time."""

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from rlhf.config import AlertsConfig
from rlhf.errors import UserError
from rlhf.ranks.run_events import read_events

MODULE = "rlhf.tracking.alerts.alert_process"
_START_S = 20.0
"""Seconds that the process may still need to start, if the run ended at once."""
log = logging.getLogger(__name__)


def last_look_s(config: AlertsConfig) -> float:
    """Return the seconds that alerts may take after the end of a command."""
    return 10 + 4 * config.timeout_s


def has_alerts(config: AlertsConfig) -> bool:
    """Return whether a run sends alerts."""
    return bool(config.kinds and (config.command or config.webhook))


def check_alerts(config: AlertsConfig) -> None:
    """Raise UserError if the command is not an executable program or the webhook is not an address."""
    if config.command and shutil.which(config.command[0]) is None:
        raise UserError(
            f"tracking.alerts.command={config.command}: {config.command[0]} is not a program. Give a list with a "
            "program (in PATH, or with its path) and its arguments; there is no shell."
        )
    if config.webhook is not None:
        parts = urlsplit(config.webhook)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError("tracking.alerts.webhook is not an address (its value is hidden). Give https://HOST/PATH.")


@contextmanager
def sends_alerts(config: AlertsConfig, run_dir: Path) -> Iterator[None]:
    """Send the alerts of the run in `run_dir` during the `with` body, and the alerts of the run's end after the body.

    No failure of an alert reaches the body. The exit waits at most for the timeouts of the last alerts.
    """
    if not has_alerts(config):
        yield
        return
    starts = sum(event.kind == "started" for event in read_events(run_dir))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(run_dir), str(starts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        log.warning("Alerts are off: their process does not start (%s).", error)
        yield
        return
    assert process.stdin is not None
    assert process.stderr is not None
    relay = threading.Thread(target=_relay, args=(process.stderr,), name="alerts", daemon=True)
    relay.start()
    try:
        yield
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(last_look_s(config) + _START_S)
        if process.poll() != 0:
            process.kill()
            log.warning("The process that sends alerts did not end normally; alerts of the run's end may be lost.")
        relay.join(1.0)


def _relay(lines: IO[bytes]) -> None:
    for line in lines:
        log.warning("%s", line.decode(errors="replace").rstrip())
