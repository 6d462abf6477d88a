"""Sums gradients over replicas, ranks that each train a whole copy of the model."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from rlhf.config.buffer_sizes import GRADIENT_BUCKET
from rlhf.ranks.collectives import all_sum


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradient of each trained parameter by its sum over the data-parallel ranks. Collective.

    A parameter stays without a gradient only if no rank has a gradient for it. Buckets and their order depend only on
    the parameters, so the bits of a sum are the same on all ranks and in every attempt.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    absent = [i for i, parameter in enumerate(trained) if parameter.grad is None]
    counts = torch.ones(len(trained), dtype=trained[0].dtype, device=trained[0].device)
    gradients = [counts]
    for i, parameter in enumerate(trained):
        if parameter.grad is None:
            counts[i] = 0.0
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = [gradient.reshape(-1) for gradient in bucket]
        total = all_sum(flat[0] if len(flat) == 1 else torch.cat(flat))
        for gradient, part in zip(bucket, total.split([each.numel() for each in flat]), strict=True):
            gradient.copy_(part.view_as(gradient))
    # Read the counts only if this rank lacks a gradient, because on a GPU the read waits for earlier work.
    found = counts.tolist() if absent else []
    for i in absent:
        if not found[i]:
            trained[i].grad = None


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors, in order, in buckets of at most `GRADIENT_BUCKET` bytes; a larger tensor alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > GRADIENT_BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    yield bucket
