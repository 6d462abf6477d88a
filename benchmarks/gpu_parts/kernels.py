"""Times attention kernels on lengths that are new to them, and in one call for a packed row."""

import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu_parts.place import Figures, Place, Skipped, seconds_of

HALF_B, SEVEN_B = (14, 2, 64), (28, 4, 128)
"""Attention heads, key heads and head dimension of Qwen2.5-0.5B and 7B."""
NEW_LENGTHS, TOKENS, ROUNDS = 50, 16384, 5
LARGEST_DIFFERENCE = 5e-2
"""Largest allowed relative difference of outputs and gradients in bfloat16, as in `rlhf/models/varlen_attention.py`."""


def _rows(shape: tuple[int, int, int], tokens: int, device: str) -> list[Any]:
    import torch

    heads, key_heads, dimension = shape
    generator = torch.Generator(device).manual_seed(tokens)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    return [torch.randn(1, n, tokens, dimension, **options).requires_grad_() for n in (heads, key_heads, key_heads)]


def _sdpa(rows: list[Any]) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    query, key, value = rows
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _varlen(rows: list[Any], lengths: list[int]) -> Any:
    import torch

    from rlhf.models.varlen_attention import _attend

    bounds = torch.tensor([0, *lengths], device=rows[0].device).cumsum(0).int()
    return _attend(rows[0], rows[1], rows[2], bounds, max(lengths), (-1, 0), None)


def _backward(forward: Callable[[], Any]) -> None:
    forward().float().square().sum().backward()


def attention(place: Place) -> Figures:
    """Time forward and backward, by backend, over 50 lengths: first new to the backend, then again."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    lengths = random.Random(1).sample(range(100, 500), 4 if place.rehearsal else NEW_LENGTHS)
    backends = {"math": SDPBackend.MATH}
    if not place.rehearsal:
        backends = {
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
        }
    figures: Figures = {"lengths": len(lengths)}
    for name, backend in backends.items():

        def every(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                for length in lengths:
                    _backward(partial(_sdpa, _rows(HALF_B, length, place.device)))

        try:
            figures[f"seconds of {name}, first"] = seconds_of(place.device, every)
            figures[f"seconds of {name}, again"] = seconds_of(place.device, every)
        except RuntimeError as error:
            figures[name] = str(error).splitlines()[0]
    return figures


def varlen(place: Place) -> Figures:
    """Compare one call of varlen_attn for a packed row of 16k tokens with a call per length."""
    import torch

    if place.rehearsal:
        raise Skipped("varlen_attn has no kernel for CPUs")
    figures: Figures = {}
    rng = random.Random(2)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(min(rng.randint(100, 500), TOKENS - sum(lengths)))
    for name, shape in (("0.5B", HALF_B), ("7B", SEVEN_B)):
        rows = _rows(shape, TOKENS, place.device)

        def together(rows: list[Any] = rows) -> Any:
            return _varlen(rows, lengths)

        def alone(rows: list[Any] = rows) -> Any:
            parts = zip(*(row.split(lengths, dim=2) for row in rows), strict=True)
            return torch.cat([_sdpa(list(part)) for part in parts], dim=2).transpose(1, 2)

        results = []
        for way in (together, alone):
            output = way()
            weights = torch.arange(output.numel(), device=place.device).view(output.shape).sin()
            results.append([output, *torch.autograd.grad((output.float() * weights).sum(), rows)])
        apart = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(*results, strict=True))
        times: dict[str, list[float]] = {"together": [], "alone": []}
        for _ in range(ROUNDS):
            times["together"].append(seconds_of("cuda", lambda: _backward(together)))
            times["alone"].append(seconds_of("cuda", lambda: _backward(alone)))
        figures[f"{name}: relative difference"] = apart
        figures |= {f"{name}: seconds {way}": statistics.median(values) for way, values in times.items()}
        place.goal(apart <= LARGEST_DIFFERENCE, f"{name}: varlen_attn differs from a call per length by {apart:.3g}")
    return figures
