"""Computes attention over a packed row with one kernel: torch's `varlen_attn` on GPUs, in half precision.

`scaled_dot_product_attention` needs a call for each distinct length: hundreds of kernels in each layer. The kernel is
chosen only after it has given the same outputs and gradients as `scaled_dot_product_attention` on the GPU of this rank.
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

log = logging.getLogger(__name__)
DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = (33, 1, 7, 64)
"""Lengths of the sequences that the check compares."""
TOLERANCE = 5e-2
"""Largest relative difference of outputs and gradients. A rounding to bfloat16 is up to 4e-3. A kernel that mixes
sequences or ignores the window differs by 0.1 or more."""
WINDOWS = ((-1, 0), (4, 0))
"""Windows that the check compares: a token attends to itself and to all tokens before it, or to the last four."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Options of transformers' attention functions that `varlen_attn` has no argument for."""


def varlen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, limit: int | None, options: dict[str, Any]
) -> Tensor | None:
    """Return the causal attention of a packed row, [1, T, heads, dimension]; None if `varlen_attn` can't compute it.

    Args:
        query: [1, heads, T, dimension]; `key` and `value` may have fewer heads.
        limit: number of tokens that a token may attend to, including itself; None: itself and all before it.
        options: transformers' options of the attention, with `cu_seq_lens_q` and `max_length_q` of the row.
    """
    if query.device.type not in DEVICES or query.dtype not in DTYPES or query.shape[-1] != value.shape[-1]:
        return None
    if any(options.get(name) is not None for name in UNSUPPORTED) or options.get("dropout"):
        return None
    causal = options.get("is_causal")  # has precedence over the module's `is_causal`, as in transformers
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return None
    longest = options["max_length_q"]
    # `limit` may come from another kind of mask than a sliding window, such as chunks. Then the kernel fits only rows
    # whose sequences are all within `limit`.
    if limit is not None and limit != options.get("sliding_window") and longest > limit:
        return None
    window = (-1 if limit is None or longest <= limit else limit - 1, 0)
    if not _works(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[-1]):
        return None
    return _attend(query, key, value, options["cu_seq_lens_q"], longest, window, options.get("scaling"))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, dimension]
    grouped = q.shape[1] != k.shape[1]
    result = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=window, enable_gqa=grouped)
    assert isinstance(result, Tensor)  # a tuple would need `return_aux`
    return result[None]


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, dimension: int) -> bool:
    """Compare the kernel with `scaled_dot_product_attention` sequence by sequence, and log the result.

    The tensors are fixed, so that no random generator advances. The check runs once for each shape of heads.
    """
    total = sum(LENGTHS)

    def fixed(heads: int, seed: int) -> Tensor:
        values = torch.arange(heads * total * dimension, dtype=torch.float64).mul(12.9898 + seed).sin()
        return values.view(1, heads, total, dimension).to(device, dtype).requires_grad_()

    rows = [fixed(heads, 0), fixed(key_heads, 1), fixed(key_heads, 2)]
    try:
        with torch.enable_grad():
            apart = _difference(rows)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        log.warning("attention of packed sequences: one call per length, since varlen_attn fails (%s)", reason)
        return False
    if not apart <= TOLERANCE:
        log.warning("attention of packed sequences: one call per length, since varlen_attn differs by %.2g", apart)
        return False
    log.info("attention of packed sequences: torch's varlen_attn")
    return True


def _difference(rows: list[Tensor]) -> float:
    """Return the largest relative difference between outputs and gradients of the kernel and of separate calls."""
    device = rows[0].device
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    grouped, found, expected = rows[0].shape[1] != rows[1].shape[1], [], []
    for window in WINDOWS:
        alone = [
            scaled_dot_product_attention(q, k, v, attn_mask=_mask(q, window[0]), enable_gqa=grouped)
            for q, k, v in zip(*(row.float().split(LENGTHS, dim=2) for row in rows), strict=True)
        ]
        found += _with_gradients(_attend(rows[0], rows[1], rows[2], bounds, max(LENGTHS), window, None), rows)
        expected += _with_gradients(torch.cat(alone, dim=2).transpose(1, 2), rows)
    pairs = zip(found, expected, strict=True)
    return max(float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs)


def _mask(queries: Tensor, before: int) -> Tensor:
    """Return a mask, [T, T] bool, in which a token sees itself and `before` earlier tokens; -1: all of them."""
    causal = torch.ones(queries.shape[2], queries.shape[2], dtype=torch.bool, device=queries.device).tril()
    return causal if before < 0 else causal.triu(-before)


def _with_gradients(output: Tensor, rows: list[Tensor]) -> list[Tensor]:
    # Use weights that differ by token and by element, so that a gradient at a wrong place shows.
    weights = torch.arange(output.numel(), device=output.device).view(output.shape).double().sin().float()
    return [output.detach(), *torch.autograd.grad((output.float() * weights).sum(), rows)]
