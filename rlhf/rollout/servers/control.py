"""Control routes of a vLLM server, each call with a deadline. Imports no torch."""

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

# Servers are in the cluster's own network, which a proxy for the internet does not reach.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class CallFailed(Exception):
    """A server refused, answered nonsense, or did not answer within its deadline."""


def post(url: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> None:
    """POST to a server, its answer thrown away; raises CallFailed."""
    data = json.dumps(body or {}).encode()
    _call(path, urllib.request.Request(url + path, data, {"Content-Type": "application/json"}), timeout_s)


def get(url: str, path: str, timeout_s: float) -> Any:
    """The JSON that a server answers; raises CallFailed."""
    answer = _call(path, urllib.request.Request(url + path), timeout_s)
    try:
        return json.loads(answer)
    except ValueError as error:
        raise CallFailed(f"{path} answered {answer[:300]!r}") from error


def _call(path: str, request: urllib.request.Request, timeout_s: float) -> bytes:
    try:
        with _opener.open(request, timeout=timeout_s) as response:
            return response.read()
    except HTTPError as error:
        raise CallFailed(f"{path} was refused with {error.code}: {error.read(300)!r}") from error
    except (OSError, HTTPException) as error:
        raise CallFailed(f"{path}: {error or type(error).__name__}") from error


def in_parallel(step: Callable[[str], None], urls: Sequence[str]) -> dict[str, str]:
    """Do `step` with each of `urls` at the same time; the reasons of those where it raises CallFailed."""

    def reason(url: str) -> str | None:
        try:
            step(url)
        except CallFailed as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max(1, len(urls)), "servers") as pool:
        return {url: why for url, why in zip(urls, pool.map(reason, urls), strict=True) if why is not None}
