"""Control routes of vLLM servers, each call with a deadline and the run's secret. Imports no torch."""

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from rlhf.rollout.servers.secret import Secret


class CallFailed(Exception):
    """A server refused, answered nonsense, or did not answer within its deadline."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirection is an error: it would take the secret elsewhere."""

    def redirect_request(self, *args: Any) -> None:
        return None


# Servers are in the cluster's own network, which a proxy for the internet does not reach.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


class ServerControl:
    """Calls to servers, named by their URLs, that raise CallFailed; `timeout_s` is the deadline of each."""

    def __init__(self, secret: Secret, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._headers = secret.headers

    def post(self, url: str, path: str, body: dict[str, Any] | None = None) -> None:
        """POST to a server, its answer thrown away."""
        headers = {**self._headers, "Content-Type": "application/json"}
        self._call(path, urllib.request.Request(url + path, json.dumps(body or {}).encode(), headers))

    def get(self, url: str, path: str) -> Any:
        """The JSON that a server answers."""
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
