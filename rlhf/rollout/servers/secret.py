"""Creates and checks the shared secret of a run's trainer and rollout servers. Imports no torch."""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.storage.files import make_dir, write_private

VARIABLE = "RLHF_ROLLOUT_SECRET"
_SENDABLE = re.compile(r"[!-~]{16,}")
_Scope = MutableMapping[str, Any]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Secret:
    """A secret, and its source: a file or an environment variable."""

    value: str = field(repr=False)
    source: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.value}"}


def run_secret(file: Path) -> Secret:
    """Return the run's secret from RLHF_ROLLOUT_SECRET, else from `file`, which is created if missing.

    Raises UserError if other users may read the file, or if its content is not a valid secret.
    """
    if secret := environment_secret(os.environ):
        return secret
    if not file.exists():
        make_dir(file.parent)
        write_private(file, secrets.token_hex(32).encode())
    with file.open() as opened:
        status = os.fstat(opened.fileno())
        ours = os.geteuid() in (0, status.st_uid)
        if not ours or status.st_mode & 0o077:
            raise UserError(
                f"{file} is open to other users, so they may know the secret of the rollout servers. Remove the file "
                f"to get a new secret (chmod 600 must work in its folder), or set {VARIABLE} in the environment."
            )
        return _checked(opened.read(), str(file))


def environment_secret(environment: Mapping[str, str]) -> Secret | None:
    """Return the secret in RLHF_ROLLOUT_SECRET; None if unset or empty. Raises UserError if it is invalid."""
    value = environment.get(VARIABLE)
    return _checked(value, VARIABLE) if value else None


def _checked(value: str, source: str) -> Secret:
    if not _SENDABLE.fullmatch(value):
        raise UserError(
            f"{source}: a secret has at least 16 visible ASCII characters and no blanks; make one with "
            "python -c 'import secrets; print(secrets.token_hex(32))'."
        )
    return Secret(value, source)


def nonce_hmac(secret: str, nonce: str, path: str) -> str:
    """Return the HMAC-SHA256 (hex) of a fresh `nonce` and a path. Only processes with the secret can compute it."""
    return hmac.new(secret.encode(), f"{nonce} {path}".encode(), hashlib.sha256).hexdigest()


class SecretMiddleware:
    """ASGI middleware that answers 401 to requests without the secret in RLHF_ROLLOUT_SECRET, on every route."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        secret = environment_secret(os.environ)
        assert secret is not None, f"{VARIABLE} is not set"
        self._app, self._wanted = app, secret.headers["Authorization"].encode()

    async def __call__(self, scope: _Scope, receive: Callable[[], Awaitable[Any]], send: _Send) -> None:
        if scope["type"] == "lifespan" or self._is_authorized(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"www-authenticate", b"Bearer"), (b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": f"{VARIABLE} is required".encode()})

    def _is_authorized(self, scope: _Scope) -> bool:
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(values[0], self._wanted)
