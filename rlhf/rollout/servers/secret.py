"""Secret that the rollout servers of a run ask for on every route, and that their trainer sends. Imports no torch."""

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
    """A secret and the place where a person finds it."""

    value: str = field(repr=False)
    place: str

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of a request that shows it."""
        return {"Authorization": f"Bearer {self.value}"}


def run_secret(file: Path) -> Secret:
    """The secret of a run: RLHF_ROLLOUT_SECRET of the environment, else that of `file`, which is made if need be.

    Raises:
        UserError: others may read the file, or what is found cannot be a secret.
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
                f"{file} is not for its owner alone, so others may know the secret of the rollout servers. Remove it "
                f"for a new one (and see that chmod 600 acts there), or give one in the environment as {VARIABLE}."
            )
        return _checked(opened.read(), str(file))


def environment_secret(environment: Mapping[str, str]) -> Secret | None:
    """The secret in RLHF_ROLLOUT_SECRET, None if it is not set or empty.

    Raises:
        UserError: it cannot be one.
    """
    value = environment.get(VARIABLE)
    return _checked(value, VARIABLE) if value else None


def _checked(value: str, place: str) -> Secret:
    if not _SENDABLE.fullmatch(value):
        raise UserError(
            f"{place}: a secret has at least 16 visible ASCII characters and no blanks; make one with "
            "python -c 'import secrets; print(secrets.token_hex(32))'."
        )
    return Secret(value, place)


def proof(secret: str, nonce: str, path: str) -> str:
    """Answer to a fresh `nonce` that only a holder of the secret can give, for one path: HMAC-SHA256 in hex."""
    return hmac.new(secret.encode(), f"{nonce} {path}".encode(), hashlib.sha256).hexdigest()


class SecretMiddleware:
    """ASGI middleware that answers 401 to whoever does not show the secret in RLHF_ROLLOUT_SECRET, on every route."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        secret = environment_secret(os.environ)
        assert secret is not None, f"{VARIABLE} is not set"
        self._app, self._wanted = app, secret.headers["Authorization"].encode()

    async def __call__(self, scope: _Scope, receive: Callable[[], Awaitable[Any]], send: _Send) -> None:
        """Hand a request on, or refuse it."""
        if scope["type"] == "lifespan" or self._shown(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"www-authenticate", b"Bearer"), (b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": f"{VARIABLE} is asked for".encode()})

    def _shown(self, scope: _Scope) -> bool:
        shown = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._wanted)
