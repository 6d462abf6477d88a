"""Saves the tensors that vLLM loses in a sleep at level 2: those that are neither parameters nor buffers.

vLLM saves a model's buffers and reloads its parameters. Other tensors, such as tables that a layer keeps in a list,
would have random values afterwards, without an error (NeMo-RL issue 2631: silently corrupt rollouts of Gemma models).
"""

from collections.abc import Iterator
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor, nn

CACHES = ("kv_cache", "_kv_cache_dummy")
"""Attributes of vLLM's layers that refer to the cache, which a wake-up creates again."""
SKIPPED = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
DEPTH = 4
"""Search this many levels of containers and objects below a module."""


class HiddenTensors:
    """Copies of a model's hidden tensors in host memory, made before a sleep."""

    def __init__(self, model: nn.Module) -> None:
        self._copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in hidden_tensors(model)]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the saved values back, after vLLM has allocated the memory of the weights again."""
        for tensor, saved in self._copies:
            tensor.copy_(saved)


def hidden_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that the modules of `model` refer to outside their parameters, buffers and caches."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    found: dict[int, Tensor] = {}
    for module in model.modules():
        own = [value for name, value in vars(module).items() if name not in CACHES]
        for tensor in chain.from_iterable(_tensors_in(value, seen, DEPTH) for value in own):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in known:
                found[id(tensor)] = tensor
    return list(found.values())


def _tensors_in(value: object, seen: dict[int, int], depth: int) -> Iterator[Tensor]:
    """Yield the tensors in `value`, up to `depth` levels below it.

    `seen` maps the id of an object to the number of levels already searched below the object.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if depth <= seen.get(id(value), 0) or isinstance(value, SKIPPED):
        return
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    if parts:
        seen[id(value)] = depth
    for part in parts:
        yield from _tensors_in(part, seen, depth - 1)
