"""Delivers an alert to a command or a webhook, in bounded time and without secrets in messages."""

import asyncio
import json
import os
import signal
import subprocess
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp

from rlhf.config import AlertsConfig
from rlhf.config.redaction import Redaction

ATTEMPTS = 3
RETRY_S = 1.0
"""Seconds before the second request to a webhook. The wait doubles before each further request."""
_LONGEST_OUTPUT = 300


def host_of(address: str) -> str:
    """Return scheme and host of an address, whose path and query may be secret."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.hostname}"


def run_command(config: AlertsConfig, facts: dict[str, object]) -> str | None:
    """Start the command with the facts as JSON on stdin and as RLHF_ALERT... variables.

    Return the problem, or None. Kill the command after `timeout_s`, and its child processes also when it ends earlier.
    """
    named = {f"RLHF_ALERT_{name.upper()}": "" if value is None else str(value) for name, value in facts.items()}
    # A message may contain a null character, but an environment variable may not.
    variables = {name: value.replace("\0", "") for name, value in named.items()}
    variables["RLHF_ALERT"] = variables.pop("RLHF_ALERT_ALERT")
    try:
        process = subprocess.Popen(
            config.command,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"{config.command[0]} does not start: {error.strerror}"
    try:
        output, _ = process.communicate(json.dumps(facts).encode(), config.timeout_s)
    except subprocess.TimeoutExpired:
        return f"{config.command[0]} took longer than tracking.alerts.timeout_s={config.timeout_s:g} and was killed"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # includes child processes that outlive the command
        process.wait()
    if process.returncode == 0:
        return None
    text = Redaction(os.environ)(output.decode(errors="replace")).strip()[-_LONGEST_OUTPUT:]
    return f"{config.command[0]} ended with exit code {process.returncode}: {text}".rstrip(": ")


def post(config: AlertsConfig, facts: dict[str, object]) -> str | None:
    """Post the facts to the webhook. Return the problem, or None.

    Repeats only a request that the server has not accepted: no connection, or the answer 429 or 5xx. A server that does
    not answer in time may have accepted the alert, so the request is not repeated.
    """
    assert config.webhook is not None
    return asyncio.run(_post(config.webhook, config.timeout_s, facts))


async def _post(address: str, timeout_s: float, facts: dict[str, object]) -> str | None:
    problem = None
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(RETRY_S * 2 ** (attempt - 1))
        try:
            # `trust_env` uses the proxies in the environment. A redirect could send the alert to any host.
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), trust_env=True) as session,
                session.post(address, json=facts, allow_redirects=False) as answer,
            ):
                if 200 <= answer.status < 300:
                    return None
                problem = f"{host_of(address)} answered {answer.status}"
                if answer.status != 429 and answer.status < 500:
                    return problem
        except aiohttp.ClientConnectorError as error:
            problem = f"{host_of(address)} cannot be reached ({type(error).__name__})"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            kind = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
            return f"{host_of(address)}: {kind} (tracking.alerts.timeout_s={timeout_s:g})"
    return problem
