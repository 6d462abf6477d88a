"""Computes attention over a packed row sequence by sequence, without a mask of the whole row.

A dense mask of a row of T tokens has T x T entries, most of them wasted. Here transformers' own function computes the
sequences of each length as a batch; on a GPU, one kernel computes the whole row if possible (`varlen_attention.py`).
Results are exact, and masks are as long as one sequence.
This module registers the implementations `sdpa_by_sequence` and `eager_by_sequence` with transformers. Without
`sequence_runs`, their results equal those of `sdpa` and `eager`.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, cat, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from rlhf.models.varlen_attention import varlen_attention

BY_SEQUENCE = {"sdpa": "sdpa_by_sequence", "eager": "eager_by_sequence"}
"""Attention implementations, and their versions that separate packed sequences."""

SDPA: Callable[..., Any] = sdpa_attention_forward
Runs = tuple[tuple[int, int], ...]  # count and length of each run of sequences in a packed row


def runs_of(lengths: Sequence[int]) -> Runs:
    return tuple((len(list(alike)), length) for length, alike in groupby(lengths))


class RowMasks:
    """Creates masks of a row and of its sequences on demand, by transformers' rule.

    The rule (causal, sliding windows, chunks) depends on positions within a sequence, so sequences of one length share
    a mask.

    Args:
        make: transformers' function that builds a mask from a rule.
        plain_up_to: sequences up to this length need no mask, because the attention itself is causal; None: no sequence
            needs a mask.
        options: transformers' options for the whole row; `mask_function` is the rule.
    """

    def __init__(self, make: Callable[..., Any], plain_up_to: int | None, options: dict[str, Any]) -> None:
        self._make, self.plain_up_to, self._options = make, plain_up_to, options
        # If the model passes position ids, transformers' rule separates sequences by their place in the row, so a mask
        # needs the sequence's real offset. Otherwise the rule sees one sequence, so every mask uses offset 0.
        self._knows_sequences = not options.get("allow_is_causal_skip", True)
        self._made: dict[int | None, Any] = {}

    def whole(self) -> Any:
        if None not in self._made:
            self._made[None] = self._make(**self._options)
        return self._made[None]

    def of(self, start: int, length: int) -> Any:
        """Return the mask [1, 1, length, length] of the sequence of `length` tokens from token `start` of the row."""
        if self.plain_up_to is None or length <= self.plain_up_to:
            return None
        if length not in self._made:
            first = start if self._knows_sequences else 0
            size = {"q_length": length, "kv_length": length, "q_offset": first, "kv_offset": first}
            self._made[length] = self._make(**self._options | size)
        return self._made[length]


def _masks(make: Callable[..., Any], *, causal_without_mask: bool, **options: Any) -> Any:
    """Return masks on demand for a causal row; make any other mask at once."""
    causal = "allow_is_bidirectional_skip" not in options and not options["use_vmap"]
    if not causal or options.get("attention_mask") is not None:
        return make(**options)
    return RowMasks(make, options.get("local_size") if causal_without_mask else 0, options)


def _attend(
    plain: Callable[..., Any] | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RowMasks | Tensor | None,
    *,
    sequence_runs: Runs | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Compute attention for each run of a packed row [1, heads, T, dimension] with `plain` (None: the model's own)."""
    if plain is None:
        plain = sys.modules[type(module).__module__].eager_attention_forward
    masks = attention_mask if isinstance(attention_mask, RowMasks) else None
    if sequence_runs is None or isinstance(attention_mask, Tensor):
        mask = attention_mask if masks is None else masks.whole()
        result: tuple[Tensor, Any] = plain(module, query, key, value, mask, **options)
        return result
    if plain is SDPA:
        limit = None if masks is None else masks.plain_up_to
        output = varlen_attention(module, query, key, value, limit, options)
        if output is not None:
            return output, None
    # Split once, which has one backward pass. With slices, each run would have a backward pass over the whole row.
    sizes = [count * length for count, length in sequence_runs]
    parts = zip(*(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    outputs, start = [], 0
    for (count, length), run in zip(sequence_runs, parts, strict=True):
        mask = None if masks is None else masks.of(start, length)
        # [1, heads, count * length, dimension] -> [count, heads, length, dimension]
        alone = (part.unflatten(2, (count, length))[0].transpose(0, 1) for part in run)
        outputs.append(plain(module, *alone, mask, **options)[0].flatten(0, 1))
        start += count * length
    return cat(outputs)[None], None


AttentionInterface.register(BY_SEQUENCE["sdpa"], partial(_attend, SDPA))
AttentionInterface.register(BY_SEQUENCE["eager"], partial(_attend, None))
AttentionMaskInterface.register(BY_SEQUENCE["sdpa"], partial(_masks, sdpa_mask, causal_without_mask=True))
AttentionMaskInterface.register(BY_SEQUENCE["eager"], partial(_masks, eager_mask, causal_without_mask=False))
