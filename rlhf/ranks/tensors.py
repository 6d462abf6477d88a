"""Named tensors from one rank to another as the bytes that they are; nothing is pickled, and nothing unpickled."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf.ranks.coordinator import Coordinator

DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "uint8": torch.uint8}
"""Types that travel, by name."""


def send_tensors(coordinator: Coordinator, tensors: Mapping[str, Tensor], to: int) -> None:
    """Send `tensors`, on the CPU and of types in DTYPES, to a rank that calls `receive_tensors`. Only these two take
    part; with several pairs all ranks go through them in one order."""
    head = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    coordinator.send(torch.tensor([len(text)]), to)
    for tensor in (text, *tensors.values()):
        if tensor.numel():
            coordinator.send(tensor.contiguous(), to)


def receive_tensors(coordinator: Coordinator, source: int) -> dict[str, Tensor]:
    """The tensors that the rank `source` sends."""
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
