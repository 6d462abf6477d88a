"""Calls control routes of vLLM servers, with a deadline and the run's secret. Imports no torch."""

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from rlhf.rollout.servers.secret import Secret


class CallFailed(Exception):
    """A server answered with an error or invalid JSON, or missed the deadline."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns redirections into errors: a redirect would leak the secret."""

    def redirect_request(self, *args: Any) -> None:
        return None


# Servers are in the cluster's network, which an internet proxy does not reach.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


class ServerControl:
    """Calls servers by URL, and raises CallFailed; `timeout_s` is the deadline of each call."""

    def __init__(self, secret: Secret, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._headers = secret.headers

    def post(self, url: str, path: str, body: dict[str, Any] | None = None) -> None:
        headers = {**self._headers, "Content-Type": "application/json"}
        self._call(path, urllib.request.Request(url + path, json.dumps(body or {}).encode(), headers))

    def get(self, url: str, path: str) -> Any:
        answer = self._call(path, urllib.request.Request(url + path, headers=self._headers))
        try:
            return json.loads(answer)
        except ValueError as error:
            raise CallFailed(f"{path} answered {answer[:300]!r}") from error

    def _call(self, path: str, request: urllib.request.Request) -> bytes:
        try:
            with _opener.open(request, timeout=self.timeout_s) as response:
                return response.read()
        except HTTPError as error:
            raise CallFailed(f"{path} failed with HTTP {error.code}: {error.read(1000)!r}") from error
        except (OSError, HTTPException) as error:
            raise CallFailed(f"{path}: {error or type(error).__name__}") from error


def in_parallel(step: Callable[[str], None], urls: Sequence[str]) -> dict[str, str]:
    """Call `step` for all `urls` at the same time; return the errors of URLs whose call raised CallFailed."""

    def reason(url: str) -> str | None:
        try:
            step(url)
        except CallFailed as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max(1, len(urls)), "servers") as pool:
        return {url: why for url, why in zip(urls, pool.map(reason, urls), strict=True) if why is not None}
