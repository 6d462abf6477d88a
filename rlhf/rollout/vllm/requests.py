"""Converts requests to vLLM's arguments, for the engine in the rank and for servers. Imports no vLLM."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from rlhf.rollout.engine import Request, SamplingParams


def request_seed(seed: int, step: int, uid: int) -> int:
    """Return the 62-bit seed of sample 0 of a prompt; sample i has this seed plus i, as in vLLM."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qqq", seed, step, uid)) >> 2


def copies_of(requests: Sequence[Request]) -> int:
    """Return the number of samples to request for siblings: 1 if greedy, since vLLM returns only one."""
    return 1 if requests[0].params.temperature == 0 else len(requests)


def sampling_kwargs(
    params: SamplingParams, n: int, request_seed: int, eos: Sequence[int], structured_outputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return JSON-able arguments of `vllm.SamplingParams`.

    Args:
        n: samples of one prompt; the seed increases by 1 per sample.
        eos: tokens that end a response; the response includes the token.
        structured_outputs: arguments of vLLM's StructuredOutputsParams; empty for none.
    """
    kwargs: dict[str, Any] = {
        "n": n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "max_tokens": params.max_tokens,
        "seed": request_seed,
        "logprobs": 0,  # of the sampled token only
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
