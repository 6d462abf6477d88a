"""Converts requests to vLLM's arguments, for the engine in the rank and for servers. Imports no vLLM."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from rlhf.rollout.engine import Request


def request_seed(seed: int, step: int, request: Request) -> int:
    """Return the request's seed: 62 random bits plus the number of the sample, as vLLM seeds the samples of a prompt.

    A continued response has other bits than its beginning, because vLLM restarts its generator with each request.
    """
    facts = struct.pack("<qqq", seed, step, request.uid)
    if request.start:
        facts += struct.pack("<q", request.start)
    return (xxhash.xxh3_64_intdigest(facts) >> 2) + request.sample


def copies_of(requests: Sequence[Request]) -> int:
    """Return how many samples to request for `requests`, which all have the same prompt.

    The result is 1 for greedy requests, because vLLM then returns only one sample.
    """
    return 1 if requests[0].params.temperature == 0 else len(requests)


def sampling_kwargs(
    request: Request, n: int, request_seed: int, eos: Sequence[int], structured_outputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return JSON-able arguments of `vllm.SamplingParams`. vLLM gets the response so far as a part of the prompt.

    Args:
        n: samples of one prompt; the seed increases by 1 per sample.
        eos: tokens that end a response; the response includes the token.
        structured_outputs: arguments of vLLM's StructuredOutputsParams; empty for none.
    """
    params = request.params
    kwargs: dict[str, Any] = {
        "n": n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "max_tokens": request.tokens_left,
        "seed": request_seed,
        "logprobs": 0,  # return the log-prob of the sampled token only
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": [] if params.ignore_eos else list(eos),
        "skip_special_tokens": False,
        "detokenize": bool(params.stop),
    }
    if params.stop:
        kwargs |= {"stop": list(params.stop), "include_stop_str_in_output": True}
    if structured_outputs:
        kwargs["structured_outputs"] = dict(structured_outputs)
    return kwargs
