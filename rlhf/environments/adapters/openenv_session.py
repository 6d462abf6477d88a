"""Plays episodes on a server of the package `openenv`: `env=openenv env.kwargs.url=http://127.0.0.1:8000`.

Each episode is one WebSocket session, because the server's HTTP routes build a new environment for each request. All
episodes of a step are open at the same time, so the server needs `max_concurrent_envs` of at least their number. A
resume opens new sessions and repeats the calls (docs/environments.md). So after `reset` with the same seed, the
server's environment must give the same answers.
"""

import importlib
import json
import urllib.request
from http.client import HTTPException
from typing import Any

from rlhf.environments import free_text
from rlhf.environments.adapters import need_package
from rlhf.environments.class_arguments import KWARGS
from rlhf.errors import UserError, did_you_mean, nearest

CONNECT_TIMEOUT_S = 10.0
_OWN = ("reward", "done", "metadata")
"""Fields that every observation has."""


class OpenEnv:
    """A session. The reward of an episode is the sum of its steps' rewards."""

    _fields: tuple[str, str | None] = "", None
    """The action's field for the policy's text, and the observation's field with the answer.

    If the second is None, the answer is the observation as JSON, without the fields `_OWN`."""

    def __init__(self, url: str, action: str | None = None, observation: str | None = None) -> None:
        """`action`, `observation`: names of `_fields`. `action` is needed unless the schema has one text field."""
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(url, connect_timeout_s=CONNECT_TIMEOUT_S)

    @classmethod
    def _preflight(cls, url: str, action: str | None = None, observation: str | None = None) -> None:
        """Import the client, and choose the two fields by the server's schema."""
        need_package(cls.__name__, "openenv", "openenv")
        importlib.import_module("openenv.core.generic_client")
        schema = _schema(url)
        texts = _texts(schema["action"])
        action = _chosen("action", action, texts, schema["action"])
        if action is None:
            raise UserError(
                f"{KWARGS}.url={url}: the server's actions have the text fields {', '.join(texts) or '(none)'}. Set "
                f"{KWARGS}.action to the field for the policy's text; if there is none, the adapter cannot play."
            )
        answers = [name for name in _texts(schema["observation"]) if name not in _OWN]
        cls._fields = action, _chosen("observation", observation, answers, schema["observation"])

    async def reset(self, **row: Any) -> str:
        arguments = {name: value for name, value in row.items() if name not in ("prompt", "data_source")}
        arguments = json.loads(json.dumps(arguments, default=str))  # the session sends JSON, which lacks dates
        try:
            begun = await self._client.reset(**arguments)
        except RuntimeError as error:
            if "CAPACITY_REACHED" not in str(error):
                raise
            raise RuntimeError(
                f"{error}. Start the server with max_concurrent_envs of at least the number of samples in a step"
            ) from error
        # The trainer appends the text to the row's prompt.
        return f"\n{self._answer(begun.observation)}"

    @free_text
    async def step(self, text: str) -> tuple[str | None, float]:
        made = await self._client.step({self._fields[0]: text})
        return None if made.done else self._answer(made.observation), float(made.reward or 0.0)

    async def close(self) -> None:
        await self._client.close()

    def _answer(self, observation: dict[str, Any]) -> str:
        field = self._fields[1]
        if field is not None:
            return str(observation[field])
        return json.dumps({name: value for name, value in observation.items() if name not in _OWN}, ensure_ascii=False)


def _schema(url: str) -> dict[str, Any]:
    address = url.replace("ws://", "http://", 1).replace("wss://", "https://", 1).rstrip("/")
    try:
        with urllib.request.urlopen(f"{address}/schema", timeout=CONNECT_TIMEOUT_S) as reply:
            schema = json.load(reply)
        if isinstance(schema["action"], dict) and isinstance(schema["observation"], dict):
            return dict(schema)
        why = "its /schema is not OpenEnv's"
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise UserError(
        f"{KWARGS}.url={url}: no OpenEnv server answers ({why}). Start the server, correct the address, and set "
        "env.network=true."
    )


def _texts(schema: dict[str, Any]) -> list[str]:
    properties = schema.get("properties", {}).items()
    return [name for name, each in properties if isinstance(each, dict) and each.get("type") == "string"]


def _chosen(which: str, given: str | None, texts: list[str], schema: dict[str, Any]) -> str | None:
    """Return the given field, or the only text of the schema; None if there are several texts or none."""
    if given is None:
        return texts[0] if len(texts) == 1 else None
    if given not in (known := schema.get("properties", {})):
        near = did_you_mean(nearest(given, known))
        raise UserError(f"{KWARGS}.{which}={given}: the server has the fields {', '.join(known)}.{near} Correct it.")
    return given
