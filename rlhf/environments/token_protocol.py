"""Reads requests of vLLM's `/inference/v1/generate`, checks that they continue the row's tokens, and writes answers.

A program that renders its own prompts sends and receives token ids. Requests and answers have the fields of vLLM 0.32.
The process of an environment imports this module, so it has no dependency.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.environments.chat_protocol import Fork, RejectedRequest, Start, check_supported, events

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "features": (None,),
    "content_parts": (None, []),
    "output_mode": (None, "tokens"),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
}
"""Fields that would change the answer, each with the values that the trainer supports."""
UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "structured_outputs": (None,),
    "prompt_logprobs": (None,),
    "prompt_logprob_token_ids": (None,),
}
"""The same for fields of `sampling_params`."""
_LOWEST = -9999.0
"""Log-prob that vLLM sends for -inf and NaN, which JSON lacks."""
_ABSENT = (
    *("prompt_logprobs", "prompt_token_id_logprobs", "mm_placeholders", "metrics"),
    *("kv_transfer_params", "ec_transfer_params"),
)
"""Fields of an answer that are always null."""


@dataclass
class TokenHistory:
    """The tokens of one episode's newest row."""

    vocabulary: int
    """Each token id of a program must be below this number."""
    tokens: list[int] = field(default_factory=list)

    def take(self, request: Any) -> list[int] | Start | Fork:
        """Add the new tokens of a request and return them, or all tokens if the request begins or rewrites the history.

        A request rewrites the history if it does not begin with all tokens so far: prompt, answers and observations.

        Raises:
            RejectedRequest: the request cannot be answered, or needs an unsupported feature.
        """
        tokens, before = _checked(request), self.tokens
        kept = _repeated(before, tokens)
        for i, token in enumerate(tokens):
            # The policy may have drawn a padding row of its embedding, which is in no tokenizer.
            if type(token) is not int or token < 0 or (i >= kept and token >= self.vocabulary):
                shown = json.dumps(token)[:20]
                raise RejectedRequest(f"token_ids[{i}]={shown} is not a token id from 0 to {self.vocabulary - 1}")
        if kept == len(tokens) == len(before):
            raise RejectedRequest("token_ids adds no token after the last answer. Append the next turn")
        self.tokens = tokens
        if not before:
            return {"token_ids": tokens}
        return tokens[kept:] if kept == len(before) else {"token_ids": tokens, "kept": kept}

    def answer(self, number: int, request: dict[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
        """Add the policy's answer, which is in the trainer's `call`, and return the answer number `number`.

        All its values are functions of the episode, so that a replay returns the same bytes.
        """
        self.tokens = self.tokens + call["token_ids"]
        usage = call["usage"]
        return dict.fromkeys(_ABSENT) | {
            "request_id": f"generate-tokens-{request.get('request_id') or number}",
            "model": str(request.get("model") or "rlhf"),
            "created": 0,
            "output_mode": "tokens",
            "choices": [_choice(call, with_log_probs=_sampling(request).get("logprobs") is not None)],
            "usage": usage | {"total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]},
            "prompt_token_ids": request["token_ids"] if request.get("return_token_ids") else None,
        }


def token_chunks(whole: dict[str, Any], with_usage: bool) -> list[str]:
    """Return the events of a streamed answer: one with all tokens, as a server may send that was slow to stream."""
    head = {"request_id": whole["request_id"], "output_mode": "tokens", "usage": None}
    parts = [{"choices": whole["choices"]}]
    if whole["prompt_token_ids"] is not None:
        parts[0]["prompt_token_ids"] = whole["prompt_token_ids"]
    if with_usage:
        parts.append({"choices": [], "usage": whole["usage"]})
    return events(head, parts)


def _checked(request: Any) -> list[Any]:
    """Return the request's list of token ids, which are not checked yet."""
    tokens = request.get("token_ids") if isinstance(request, dict) else None
    if not isinstance(tokens, list) or not tokens:
        raise RejectedRequest("the body is not a JSON object with `token_ids`, a list of at least one token id")
    check_supported(request, UNSUPPORTED)
    sampling = _sampling(request)
    if not isinstance(sampling, dict):
        raise RejectedRequest("sampling_params is not a JSON object")
    check_supported(sampling, UNSUPPORTED_SAMPLING, "sampling_params.")
    if sampling.get("logprobs") not in (None, 0, 1):
        shown = json.dumps(sampling["logprobs"])[:20]
        raise RejectedRequest(f"sampling_params.logprobs={shown}: only sampled tokens have log-probs. Set it to 1")
    return tokens


def _sampling(request: dict[str, Any]) -> Any:
    return request.get("sampling_params") or {}


def _repeated(before: Sequence[int], now: Sequence[Any]) -> int:
    """Return how many of the first tokens are the same."""
    if now[: len(before)] == before:
        return len(before)
    return next((i for i, (one, other) in enumerate(zip(before, now, strict=False)) if one != other), len(now))


def _choice(call: Mapping[str, Any], *, with_log_probs: bool) -> dict[str, Any]:
    ends = [end for _, end in call["versions"]]
    return {
        "index": 0,
        "token_ids": call["token_ids"],
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": {"content": list(map(_log_prob, call["token_ids"], call["log_probs"]))} if with_log_probs else None,
        "weight_versions": [
            {"version": str(version), "start": start, "end": end}
            for (version, end), start in zip(call["versions"], [0, *ends], strict=False)
        ],
        "routed_experts": None,
        "sampling_mask": None,
    }


def _log_prob(token: int, log_prob: float) -> dict[str, Any]:
    entry = {"token_id": token, "logprob": log_prob if log_prob > _LOWEST else _LOWEST, "rank": None}
    # Clients of earlier releases, such as the package renderers, read `token`.
    return entry | {"token": f"token_id:{token}", "top_logprobs": [entry]}
