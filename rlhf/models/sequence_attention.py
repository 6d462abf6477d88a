"""Attention over a packed row, sequence by sequence: no mask of the whole row, no product across sequences.

A dense mask of a row of T tokens has T x T entries, and its products are computed though nothing comes of most of them.
Here each sequence is attended to alone, by the library's own function, and sequences of equal length together: exact,
with the memory of the longest sequence. Registered with the library as `sdpa_by_sequence` and `eager_by_sequence`;
without `sequence_runs` they are its `sdpa` and `eager`.
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

BY_SEQUENCE = {"sdpa": "sdpa_by_sequence", "eager": "eager_by_sequence"}
"""Attention implementations, and those that treat packed sequences apart."""

Runs = tuple[tuple[int, int], ...]
"""How many sequences of which length lie one after the other in a packed row."""


def runs_of(lengths: Sequence[int]) -> Runs:
    """The runs of equal lengths among `lengths`, in that order."""
    return tuple((len(list(alike)), length) for length, alike in groupby(lengths))


class RowMasks:
    """Masks of one row and of each sequence in it, made by the library's rule when they are needed.

    The rule (causal, sliding windows, chunks) looks at positions within a sequence, so that sequences of one length
    have one mask.

    Args:
        make: the library's function that turns a rule into a mask.
        plain_up_to: length up to which a sequence needs no mask but causality, which the attention knows by itself;
            None: any length.
        options: the library's, of the whole row; `mask_function` is the rule.
    """

    def __init__(self, make: Callable[..., Any], plain_up_to: int | None, options: dict[str, Any]) -> None:
        self._make, self._plain_up_to, self._options = make, plain_up_to, options
        # Of a model that does not show its positions where masks are made, the rule counts from the row's beginning.
        self._knows_sequences = not options.get("allow_is_causal_skip", True)
        self._made: dict[int | None, Any] = {}

    def whole(self) -> Any:
        """The mask of the row, as the library has it."""
        if None not in self._made:
            self._made[None] = self._make(**self._options)
        return self._made[None]

    def of(self, start: int, length: int) -> Any:
        """The mask of a sequence of `length` tokens that begins at token `start` of the row, [1, 1, length, length]."""
        if self._plain_up_to is None or length <= self._plain_up_to:
            return None
        if length not in self._made:
            first = start if self._knows_sequences else 0
            size = {"q_length": length, "kv_length": length, "q_offset": first, "kv_offset": first}
            self._made[length] = self._make(**self._options | size)
        return self._made[length]


def _masks(make: Callable[..., Any], *, causal_without_mask: bool, **options: Any) -> Any:
    """The masks of a causal row; what else a model asks for is made at once."""
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
    """Attention by `plain` (None: the model's own), of each run of a packed row [1, heads, T, dimension] by itself."""
    if plain is None:
        plain = sys.modules[type(module).__module__].eager_attention_forward
    masks = attention_mask if isinstance(attention_mask, RowMasks) else None
    if sequence_runs is None or isinstance(attention_mask, Tensor):
        mask = attention_mask if masks is None else masks.whole()
        result: tuple[Tensor, Any] = plain(module, query, key, value, mask, **options)
        return result
    # One split has one backward pass; a slice per run would each have one over the whole row.
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


AttentionInterface.register(BY_SEQUENCE["sdpa"], partial(_attend, sdpa_attention_forward))
AttentionInterface.register(BY_SEQUENCE["eager"], partial(_attend, None))
AttentionMaskInterface.register(BY_SEQUENCE["sdpa"], partial(_masks, sdpa_mask, causal_without_mask=True))
AttentionMaskInterface.register(BY_SEQUENCE["eager"], partial(_masks, eager_mask, causal_without_mask=False))
