"""Sends requests and samples between ranks as the bytes of tensors, without loss and without pickle.

Each rank receives only the requests or samples that it needs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice

import torch
from torch import Tensor

from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout.engine import Request, SamplingParams, siblings
from rlhf.rollout.sample import Sample
from rlhf.rollout.sample_codec import from_arrays, to_arrays

DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "uint8": torch.uint8}
"""Types that ranks can exchange, by name."""
RESPONSE = "response."
"""Prefix of the names of tensors that contain the requests' responses so far."""


def gather_requests(
    requests: Sequence[Request], sources: Sequence[int], receivers: Sequence[int], coordinator: Coordinator
) -> list[list[Request]]:
    """Send requests from the ranks `sources` to the ranks `receivers`. Collective over sources and receivers.

    Returns:
        On a receiver, one list of requests for each source, in the order of `sources`. An empty list on other ranks.
    """
    rank, gathered = coordinator.rank, []
    for source in sources:  # all ranks use the same order, so that there is no deadlock
        if rank == source:
            for receiver in receivers:
                if receiver != rank:
                    send_tensors(coordinator, requests_to_tensors(requests), receiver)
        if rank in receivers:
            own = rank == source
            gathered.append(list(requests) if own else requests_from_tensors(receive_tensors(coordinator, source)))
    return gathered


def scatter_samples(parts: Sequence[Sequence[Sample]], coordinator: Coordinator) -> list[Sample]:
    """Send each rank its entry of the leader's `parts`, and return this rank's entry. Collective.

    The `parts` of all other ranks are ignored.
    """
    if not coordinator.is_leader:
        return from_arrays({name: tensor.numpy() for name, tensor in receive_tensors(coordinator, 0).items()})
    for rank in range(1, coordinator.world_size):
        arrays = to_arrays(parts[rank])
        send_tensors(coordinator, {name: torch.from_numpy(array) for name, array in arrays.items()}, rank)
    return list(parts[0])


def requests_to_tensors(requests: Sequence[Request]) -> dict[str, Tensor]:
    """Return `requests` as tensors, without loss.

    `token_ids` (int32) are the concatenated prompts, one for each group of siblings. `rows` (int64, [groups, 6]) are
    uid, number of the first sample, number of siblings, length of the prompt, index of the parameters, and 1 for a
    request with a response so far. `params` (uint8) are the bytes of a JSON list of parameters. The other tensors are
    the arrays of the responses so far (`sample_codec`).
    """
    numbers = {params: i for i, params in enumerate(dict.fromkeys(request.params for request in requests))}
    prompts = [(requests[group[0]], len(group)) for group in siblings(requests)]
    rows = [
        (first.uid, first.sample, count, len(first.token_ids), numbers[first.params], first.response is not None)
        for first, count in prompts
    ]
    responses = to_arrays([first.response for first, _ in prompts if first.response is not None])
    return {
        "token_ids": torch.tensor([token for first, _ in prompts for token in first.token_ids], dtype=torch.int32),
        "rows": torch.tensor(rows, dtype=torch.int64).view(-1, 6),
        "params": torch.tensor(list(json.dumps([asdict(params) for params in numbers]).encode()), dtype=torch.uint8),
        **{f"{RESPONSE}{name}": torch.from_numpy(array) for name, array in responses.items()},
    }


def requests_from_tensors(tensors: dict[str, Tensor]) -> list[Request]:
    entries = json.loads(tensors["params"].numpy().tobytes())
    all_params = [SamplingParams(**entry | {"stop": tuple(entry["stop"])}) for entry in entries]
    token_ids = iter(tensors["token_ids"].tolist())
    requests = []
    arrays = {name.removeprefix(RESPONSE): tensors[name].numpy() for name in tensors if name.startswith(RESPONSE)}
    responses = iter(from_arrays(arrays))
    for uid, first, count, length, params, begun in tensors["rows"].tolist():
        prompt, response = list(islice(token_ids, length)), next(responses) if begun else None
        numbers = range(first, first + count)
        requests += [Request(uid, prompt, all_params[params], number, response) for number in numbers]
    return requests


def send_tensors(coordinator: Coordinator, tensors: Mapping[str, Tensor], to: int) -> None:
    """Send `tensors` (CPU, types in DTYPES) to a rank that calls `receive_tensors`. No other rank takes part.

    If several pairs exchange tensors, all ranks must go through the pairs in the same order.
    """
    head = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    coordinator.send(torch.tensor([len(text)]), to)
    for tensor in (text, *tensors.values()):
        if tensor.numel():
            coordinator.send(tensor.contiguous(), to)


def receive_tensors(coordinator: Coordinator, source: int) -> dict[str, Tensor]:
    length = torch.empty(1, dtype=torch.int64)
    coordinator.receive(length, source)
    text = torch.empty(int(length), dtype=torch.uint8)
    coordinator.receive(text, source)
    received = {}
    for name, (dtype, shape) in json.loads(text.numpy().tobytes()).items():
        received[name] = torch.empty(shape, dtype=DTYPES[dtype])
        if received[name].numel():
            coordinator.receive(received[name], source)
    return received
