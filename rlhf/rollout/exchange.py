"""Requests and samples on their way between ranks: as tensors without loss, each only to the rank that needs it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import get_args

import torch
from torch import Tensor

from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.tensors import receive_tensors, send_tensors
from rlhf.rollout.engine import FinishReason, Request, Sample, SamplingParams, as_spans

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


def gather_requests(
    mine: Sequence[Request], sources: Sequence[int], takers: Sequence[int], coordinator: Coordinator
) -> list[list[Request]]:
    """The requests of each of the ranks `sources`, in their order, on the ranks `takers`; nothing on the others.

    For all of both to call; other ranks take no part.
    """
    rank, gathered = coordinator.rank, []
    for source in sources:  # one order on all ranks, so that nobody waits in vain
        if rank == source:
            for taker in takers:
                if taker != rank:
                    send_tensors(coordinator, requests_to_tensors(mine), taker)
        if rank in takers:
            theirs = mine if rank == source else requests_from_tensors(receive_tensors(coordinator, source))
            gathered.append(list(theirs))
    return gathered


def hand_out_samples(parts: Sequence[Sequence[Sequence[Sample]]], coordinator: Coordinator) -> list[list[Sample]]:
    """This rank's of the leader's `parts`, one for each rank: the samples of each request. Those of other ranks don't
    count. Collective."""
    if not coordinator.is_leader:
        return samples_from_tensors(receive_tensors(coordinator, 0))
    for rank in range(1, coordinator.world_size):
        send_tensors(coordinator, samples_to_tensors(parts[rank]), rank)
    return [list(of_request) for of_request in parts[0]]


def requests_to_tensors(requests: Sequence[Request]) -> dict[str, Tensor]:
    """`requests` without loss: token ids flat, uid, length and place of the parameters as rows, these as JSON bytes."""
    places = {params: place for place, params in enumerate(dict.fromkeys(request.params for request in requests))}
    rows = [(request.uid, len(request.token_ids), places[request.params]) for request in requests]
    return {
        "token_ids": torch.tensor([token for request in requests for token in request.token_ids], dtype=torch.int64),
        "rows": torch.tensor(rows, dtype=torch.int64).view(-1, 3),
        "params": torch.tensor(list(json.dumps([asdict(params) for params in places]).encode()), dtype=torch.uint8),
    }


def requests_from_tensors(tensors: dict[str, Tensor]) -> list[Request]:
    """The requests that `requests_to_tensors` was given."""
    every = [SamplingParams(**entry | {"stop": tuple(entry["stop"])}) for entry in _parsed(tensors["params"])]
    token_ids = iter(tensors["token_ids"].tolist())
    return [
        Request(uid, list(islice(token_ids, length)), every[place]) for uid, length, place in tensors["rows"].tolist()
    ]


def samples_to_tensors(of_requests: Sequence[Sequence[Sample]]) -> dict[str, Tensor]:
    """The samples of each request without loss: token ids and log-probs flat, the rest as rows."""
    samples = [sample for of_request in of_requests for sample in of_request]
    rows = [
        (s.uid, s.sample, len(s.token_ids), REASONS.index(s.finish_reason), s.version, len(s.observations))
        for s in samples
    ]
    return {
        "token_ids": torch.tensor([token for sample in samples for token in sample.token_ids], dtype=torch.int64),
        # Python's floats are float64: nothing is rounded.
        "log_probs": torch.tensor([value for sample in samples for value in sample.log_probs], dtype=torch.float64),
        "rows": torch.tensor(rows, dtype=torch.int64).view(-1, 6),
        "observations": torch.tensor([span for s in samples for span in s.observations], dtype=torch.int64).view(-1, 2),
        "counts": torch.tensor([len(of_request) for of_request in of_requests], dtype=torch.int64),
    }


def samples_from_tensors(tensors: dict[str, Tensor]) -> list[list[Sample]]:
    """The samples that `samples_to_tensors` was given."""
    token_ids, log_probs = (iter(tensors[name].tolist()) for name in ("token_ids", "log_probs"))
    spans = iter(tensors["observations"].tolist())
    samples = (
        Sample(
            uid,
            number,
            list(islice(token_ids, length)),
            list(islice(log_probs, length)),
            REASONS[reason],
            version,
            as_spans(islice(spans, observed)),
        )
        for uid, number, length, reason, version, observed in tensors["rows"].tolist()
    )
    return [list(islice(samples, count)) for count in tensors["counts"].tolist()]


def _parsed(text: Tensor) -> list[dict]:
    return json.loads(text.numpy().tobytes())
