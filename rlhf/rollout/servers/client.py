"""HTTP client of one vLLM server; validates every answer."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import aiohttp
import numpy as np

from rlhf.errors import UserError
from rlhf.rollout.engine import Request
from rlhf.rollout.sample import Sample
from rlhf.rollout.sampling_mask import SamplingMask
from rlhf.rollout.servers.dispatch import ServerLoad
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.stop_strings import cut_at_seam
from rlhf.rollout.vllm.requests import sampling_kwargs

CONNECT_S = 10.0
LOWEST_LOG_PROB = -9999.0  # value that vLLM's server sends for a log-prob that is not a number
ROUNDING = 1e-3  # tolerance for log-probs above 0
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
ENGINE_ID = "generate-tokens-"
"""Prefix that vLLM's engine adds to the names of requests."""
SHOWN = 200  # maximal number of characters of an answer in an error


class ServerFailure(Exception):
    """The server sent no valid answer. `hung`: no answer came before the deadline. `status`: code of an HTTP error."""

    def __init__(self, reason: str, *, hung: bool = False, status: int | None = None) -> None:
        super().__init__(reason)
        self.hung, self.status = hung, status


class SecretRejected(ServerFailure):
    """The server answered 401: the request lacks the secret that the server expects."""


class StaleAnswer(Exception):
    """The server generated the answer with other weights than requested."""


@dataclass(frozen=True)
class RequestSettings:
    """Settings that all requests of a run share."""

    eos: Sequence[int]
    structured_outputs: Mapping[str, Any]
    vocab_size: int
    tokenizer: Any = None  # decodes continued responses with stop strings
    adapter_rank: int | None = None
    """vLLM's `max_lora_rank` if the servers apply adapters to a base. Each request then names the adapters."""
    longest: int | None = None
    """Tokens of the longest prompt plus the longest response."""
    sampling_mask: bool = False
    """Whether the servers return sampling masks."""


def open_session() -> aiohttp.ClientSession:
    # Connections are not kept: the server may close a connection just when a request reuses it.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


class ServerClient:
    """Sends requests to the server at `url`. Every call raises ServerFailure if the server sends no valid answer."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        settings: RequestSettings,
        answer_timeout_s: float,
        secret: Secret,
    ) -> None:
        self._session, self._url, self._settings, self._secret = session, url, settings, secret
        self._short = aiohttp.ClientTimeout(total=answer_timeout_s, sock_connect=CONNECT_S)

    async def weight_label(self) -> str:
        """Check that the server is alive, and return its label of the weights."""
        await self._call("GET", "/health", self._short)
        return _text(_parsed(await self._call("GET", "/weight_info", self._short)), "weight_version")

    async def requires_secret(self) -> bool:
        """Return whether the server rejects requests without a secret."""
        try:
            await self._call("GET", "/health", self._short, headers={})
        except SecretRejected:
            return True
        return False

    async def version(self) -> str:
        return _text(_parsed(await self._call("GET", "/version", self._short)), "version")

    async def max_model_len(self) -> int:
        """Return the server's limit of prompt plus response in tokens.

        At the limit, vLLM ends a response as if the response had reached `max_tokens`.
        """
        models = _parsed(await self._call("GET", "/v1/models", self._short)).get("data")
        first = models[0] if isinstance(models, list) and models else None
        found = first.get("max_model_len") if isinstance(first, dict) else None
        if not isinstance(found, int) or isinstance(found, bool):
            raise ServerFailure(f"/v1/models: max_model_len is missing: {_short(str(models))}")
        return found

    async def serves_adapters(self) -> bool:
        """Return whether the server can load adapters."""
        try:
            await self._call("GET", "/v1/load_lora_adapter", self._short)
        except ServerFailure as failure:
            if failure.status not in (404, 405):
                raise
            return failure.status == 405  # the route exists for POST
        return False

    async def load(self) -> ServerLoad:
        """Return the server's load, summed over its engines. Raises UserError if the server does not count tokens."""
        content = await self._call("GET", "/metrics", self._short)
        # One value per engine of the server, by metric.
        values: dict[str, list[float]] = {name: [] for name in (*_TOKENS, _RUNNING, _WAITING)}
        try:
            for line in content.decode(errors="replace").splitlines():
                if (name := line.partition("{")[0].partition(" ")[0]) in values:
                    values[name].append(float(line.rpartition(" ")[2]))
        except ValueError as error:
            raise ServerFailure(f"/metrics: {error}") from error
        if not any(values[name] for name in _TOKENS):
            raise UserError(
                f"The rollout server {self._url} does not count its tokens, so a busy server looks like a hung "
                "server. Start it without --disable-log-stats (rollout.engine_kwargs.vllm)."
            )
        if not all(math.isfinite(value) for found in values.values() for value in found):
            raise ServerFailure("/metrics: a count is not a finite number")
        return ServerLoad(
            tokens=sum(sum(values[name]) for name in _TOKENS),
            running=int(sum(values[_RUNNING])),
            waiting=int(sum(values[_WAITING])),
        )

    async def generate(self, request: Request, seed: int, label: str, version: int, name: str = "") -> Sample:
        """Return the sample of `request`, drawn with `seed`. Wait without a deadline.

        Args:
            label: label of the weights that the server must use. They are the policy's after `version` steps.
            name: unique name for `abort`, after which the sample is `partial`.

        Raises:
            StaleAnswer: the server used other weights for a part of the answer.
            UserError: the server rejects the request, as any other server would.
        """
        settings = self._settings
        sampling = sampling_kwargs(request, 1, seed, settings.eos, settings.structured_outputs)
        if settings.sampling_mask and request.params.temperature == 0:
            # Such a server rejects greedy requests. With top_k=1, it draws the likeliest token, or one of several that
            # are equally likely: some of vLLM's top-k kernels keep ties. The log-prob is then below 0.
            sampling |= {"temperature": 1.0, "top_k": 1}
        body = {
            "token_ids": request.context,
            **({"request_id": name} if name else {}),
            **({"model": label} if settings.adapter_rank else {}),
            "sampling_params": sampling,
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        answer = await self._call("POST", "/inference/v1/generate", timeout, body)
        sample = sample_of(answer, request, settings.vocab_size, label, version)
        return cut_at_seam(sample, request, settings.tokenizer)

    async def abort(self, names: Sequence[str]) -> None:
        """Make the server answer the requests `names` with the tokens so far. Unknown names have no effect."""
        await self._call("POST", "/abort_requests", self._short, {"request_ids": [ENGINE_ID + name for name in names]})

    async def _call(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        try:
            async with self._session.request(
                method,
                self._url + path,
                json=body,
                timeout=timeout,
                headers=self._secret.headers if headers is None else headers,
                allow_redirects=False,  # a redirect would leak the secret
            ) as response:
                content = await response.read()
                status = response.status
        except TimeoutError as error:
            raise ServerFailure(f"{path}: no answer in time", hung=True) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerFailure(f"{path}: {type(error).__name__}: {_short(str(error))}") from error
        if status == 400 and body is not None and (fault := _fault(content)):
            raise UserError(
                f"The rollout server {self._url} rejects a request: {fault}. Check rollout.stop, "
                "rollout.structured_outputs, rollout.engine_kwargs.vllm, data.max_prompt_length and "
                "data.max_response_length."
            )
        if status == 401:
            raise SecretRejected(f"{path}: HTTP 401: {_short(content.decode(errors='replace'))}")
        if status != 200:
            raise ServerFailure(f"{path}: HTTP {status}: {_short(content.decode(errors='replace'))}", status=status)
        return content


def sample_of(content: bytes, request: Request, vocab_size: int, label: str, version: int) -> Sample:
    """Return the checked sample in an answer.

    Raises:
        ServerFailure: something is missing or invalid.
        StaleAnswer: the answer is valid, but a part of it was generated with other weights than `label`.
    """
    choices = _parsed(content).get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ServerFailure(f"not an answer with one choice: {_short(content.decode(errors='replace'))}")
    sample, labels = _sample(choices[0], request, vocab_size, version)
    if labels - {label}:
        raise StaleAnswer(f"an answer by the weights {sorted(labels - {label})}, not {label!r}")
    return sample


def _sample(choice: dict[str, Any], request: Request, vocab_size: int, version: int) -> tuple[Sample, set[str]]:
    max_tokens = request.tokens_left
    token_ids, reason = choice.get("token_ids"), choice.get("finish_reason")
    if not isinstance(token_ids, list) or not all(_is_int(token) and 0 <= token < vocab_size for token in token_ids):
        raise ServerFailure(f"token_ids are not numbers from 0 to {vocab_size - 1}")
    if reason not in ("stop", "length", "abort"):
        raise ServerFailure(f"finish_reason {reason!r}")
    if reason == "abort" and not token_ids:
        return request.so_far, set()
    if not 0 < len(token_ids) <= max_tokens - (reason == "abort"):
        raise ServerFailure(f"{len(token_ids)} tokens, finish_reason {reason!r}; 1 to {max_tokens} are possible")
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or len(content) != len(token_ids):
        raise ServerFailure(f"not one log-prob for each of {len(token_ids)} tokens")
    log_probs = []
    for token, entry in zip(token_ids, content, strict=True):
        value = entry.get("logprob") if isinstance(entry, dict) and entry.get("token_id") == token else None
        if not isinstance(value, (int, float)) or not math.isfinite(value) or not LOWEST_LOG_PROB < value < ROUNDING:
            raise ServerFailure(f"no finite log-prob of token {token}: {_short(str(entry))}")
        log_probs.append(value)
    mask = _sampling_mask(choice.get("sampling_mask"), token_ids, vocab_size) if request.params.sampling_mask else None
    sample = request.answered(token_ids, log_probs, "partial" if reason == "abort" else reason, version, mask)
    return sample, _labels(choice.get("weight_versions"), len(token_ids))


def _sampling_mask(masks: Any, token_ids: Sequence[int], vocab_size: int) -> SamplingMask:
    """Return the checked `masks` of an answer: for each of `token_ids`, the ids of the kept tokens."""
    if masks is None:
        raise UserError(
            "rollout.sampling_mask=true: a rollout server returns no sampling masks. Start it with "
            "--return-sampling-mask, or set rollout.sampling_mask=false."
        )
    if not isinstance(masks, list) or len(masks) != len(token_ids):
        raise ServerFailure(f"not one sampling mask for each of {len(token_ids)} tokens")
    # Answers can have millions of ids, and all answers share one event loop, so NumPy checks them.
    kept = list(chain.from_iterable(masks)) if set(map(type, masks)) == {list} else [None]
    ids = np.array(kept if set(map(type, kept)) == {int} else [-1])  # integers beyond int64 give another dtype
    if ids.dtype != np.int64 or ids.min() < 0 or ids.max() >= vocab_size:
        raise ServerFailure(f"a sampling mask is not a list of tokens below {vocab_size}: {_short(str(masks))}")
    counts = np.array(list(map(len, masks)), np.int32)
    found = np.flatnonzero(ids == np.repeat(token_ids, counts))
    lacking = np.setdiff1d(np.arange(len(masks)), counts.cumsum().searchsorted(found, side="right"))
    if len(lacking):
        first = int(lacking[0])
        raise ServerFailure(
            f"the sampling mask of token {token_ids[first]} lacks this token: {_short(str(masks[first]))}"
        )
    return SamplingMask(counts, ids.astype(np.int32))


def _labels(spans: Any, tokens: int) -> set[str]:
    """Return the labels in the `spans` of an answer; the spans must cover all `tokens` of the answer."""
    labels, end = set(), 0
    for span in spans if isinstance(spans, list) else ():
        if not isinstance(span, dict) or span.get("start") != end or not _is_int(span.get("end")):
            break
        labels.add(_text(span, "version"))
        end = span["end"]
    if end != tokens:
        raise ServerFailure(f"weight_versions do not cover all {tokens} tokens: {_short(str(spans))}")
    return labels


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ServerFailure(f"not JSON: {_short(content.decode(errors='replace'))}") from error
    if not isinstance(parsed, dict):
        raise ServerFailure(f"not a JSON object: {_short(content.decode(errors='replace'))}")
    return parsed


def _text(parsed: dict[str, Any], key: str) -> str:
    value = parsed.get(key)
    if not isinstance(value, str):
        raise ServerFailure(f"{key} is missing: {_short(str(parsed))}")
    return value


def _fault(content: bytes) -> str | None:
    try:
        error = _parsed(content).get("error")
    except ServerFailure:
        return None
    message = error.get("message") if isinstance(error, dict) else None
    return _short(message) if isinstance(message, str) else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."
