"""Preallocates a key-value cache in which rows are added and removed.

All rows write their next token into the same column, so a step writes one slice per layer in place. A row's tokens are
contiguous and end at that column. To the model this is plain left padding, for every kind of attention.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from rlhf.errors import UserError


class Span:
    """The columns in use, shared by all layers: rows [0, rows) hold tokens in columns [start, end)."""

    def __init__(self) -> None:
        self.rows = self.start = self.end = 0


class RowLayer(CacheLayerMixin):
    """Keys and values [row capacity, heads, column capacity, dim] of one layer; `window` 0 means full attention."""

    keys: Any
    values: Any

    def __init__(self, span: Span, window: int = 0) -> None:
        super().__init__()
        self.span, self.window = span, window
        self.is_sliding = window > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Use the states that the model computed in a prefill as the layer's buffers."""
        self.keys, self.values, self.is_initialized = key_states, value_states, True

    def _first(self) -> int:
        """Return the first column that the next query attends to."""
        return max(self.span.start, self.span.end - self.window + 1) if self.window else self.span.start

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, 1, dim] into the column `span.end`; return the keys and values that the query sees."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        rows, end, first = self.span.rows, self.span.end, self._first()
        self.keys[:rows, :, end : end + 1] = key_states
        self.values[:rows, :, end : end + 1] = value_states
        return self.keys[:rows, :, first : end + 1], self.values[:rows, :, first : end + 1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length, offset) of the columns that `update` returns, counted from `span.start`."""
        first = self._first()
        return self.span.end + query_length - first, first - self.span.start

    def get_seq_length(self) -> int:
        return self.span.end - self.span.start

    def get_max_length(self) -> int:
        return -1

    def reserve(self, like: "RowLayer", rows: int, columns: int, end: int) -> None:
        """Allocate buffers with the heads and sizes of `like`, and move the present tokens to end at column `end`."""
        buffers = []
        for old, pattern in ((self.keys, like.keys), (self.values, like.values)):
            # Fill with zeros: a masked column is multiplied by 0, and 0 times an uninitialized NaN is NaN.
            new = pattern.new_zeros(rows, pattern.shape[1], columns, pattern.shape[3])
            if old is not None:
                span = self.span
                new[: span.rows, :, end - (span.end - span.start) : end] = old[: span.rows, :, span.start : span.end]
            buffers.append(new)
        self.keys, self.values = buffers
        self.is_initialized = True


class RowCache(Cache):
    """One `RowLayer` for each attention layer of the model, empty before the prefill."""

    def __init__(self, config: Any) -> None:
        self.span = Span()
        layers: list[Any] = []
        for layer in DynamicCache(config=config).layers:
            if type(layer) is DynamicSlidingWindowLayer:
                layers.append(RowLayer(self.span, layer.sliding_window))
            elif type(layer) is DynamicLayer:
                layers.append(RowLayer(self.span))
            elif type(layer).__name__ == "DummyLayer":  # by name: transformers 5.19, which vLLM needs, lacks it
                layers.append(layer)
            else:
                raise UserError(
                    f"model.path: rollout.name=embedded cannot generate with {config.model_type} models, which cache a "
                    f"{type(layer).__name__}. Choose a model with full or sliding-window attention."
                )
        super().__init__(layers=layers)
        self.attention = [layer for layer in layers if isinstance(layer, RowLayer)]

    def reserve(self, like: "RowCache", rows: int, columns: int, end: int) -> None:
        """Move to buffers of `rows` x `columns`, shaped as in `like`; the present tokens end at column `end`."""
        for layer, other in zip(self.attention, like.attention, strict=True):
            layer.reserve(other, rows, columns, end)
        self.span.start, self.span.end = end - (self.span.end - self.span.start), end

    def append(self, prefill: "RowCache", source: Tensor, width: int) -> None:
        """Append a row for each index in `source`: the last `width` columns of the prefill's row with this index."""
        end, rows = self.span.end, slice(self.span.rows, self.span.rows + len(source))
        for layer, other in zip(self.attention, prefill.attention, strict=True):
            for own, new in ((layer.keys, other.keys), (layer.values, other.values)):
                own[rows, :, end - width : end] = new[:, :, -width:].index_select(0, source)
                # The mask covers an earlier sample's leftovers, but 0 times a leftover inf would be NaN.
                own[rows, :, : end - width] = 0
        self.span.rows += len(source)

    def move(self, source: Tensor, target: Tensor, rows: int) -> None:
        """Copy the rows `source` over the rows `target`, then keep the first `rows`."""
        if len(source):
            for layer in self.attention:
                for own in (layer.keys, layer.values):
                    own[target, :, : self.span.end] = own[:, :, : self.span.end].index_select(0, source)
        self.span.rows = rows
