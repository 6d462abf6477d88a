"""Reads the shapes of a model's weights, and derives the sizes of activations and caches. Imports no torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf.models.config_check import read_object, text_part
from rlhf.models.parameter_count import model_folder, tensor_shapes

Shapes = Mapping[str, tuple[int, ...]]
LAYER = re.compile(r"^(.*?\.\d+)\.")
"""Prefix of a weight's name that identifies its layer: up to the first number."""
EXPERT = re.compile(r"^(.*\.experts)\.\d+\.(.+)$")
ROOT, HEAD = "", "head"
VALUE_HEAD = "score.weight"
FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Model type -> n, if each n-th layer attends to all tokens. The files of these models may lack `layer_types` and
`sliding_window_pattern`; transformers then uses these values."""


@dataclass(frozen=True)
class ModelShapes:
    """A model's weights, without tied copies, and the text part of its config.json."""

    weights: Shapes
    config: Mapping[str, Any]

    @cached_property
    def count(self) -> int:
        return sum(map(math.prod, self.weights.values()))

    @cached_property
    def units(self) -> dict[str, Shapes]:
        """Return weights by the unit that FSDP2 gathers: each layer, an untied head, and the rest under `ROOT`."""
        units: dict[str, dict[str, tuple[int, ...]]] = {ROOT: {}}
        for name, shape in self.weights.items():
            layer = LAYER.match(name)
            units.setdefault(layer[1] if layer else HEAD if is_head(name) else ROOT, {})[name] = shape
        return dict(units)

    @cached_property
    def layers(self) -> list[Shapes]:
        return [self.units[name] for name in self.layer_names]

    @cached_property
    def layer_names(self) -> list[str]:
        return [name for name in self.units if name not in (ROOT, HEAD)]

    @cached_property
    def vocabulary(self) -> int:
        """Return the number of rows of the embedding."""
        return self._embedding[0]

    @cached_property
    def hidden(self) -> int:
        """Return the width of the residual stream."""
        return self._size("hidden_size", "n_embd", "d_model") or self._embedding[1]

    @cached_property
    def _embedding(self) -> tuple[int, ...]:
        rows = self._size("vocab_size")
        matrices = [shape for shape in self.units[ROOT].values() if len(shape) == 2]
        return next((shape for shape in matrices if shape[0] == rows), max(matrices, default=(0, 0)))

    @property
    def has_own_head(self) -> bool:
        """Return whether the head is not tied to the embedding."""
        return HEAD in self.units

    @property
    def head(self) -> tuple[int, ...]:
        """Return the shape of the head's matrix."""
        if VALUE_HEAD in self.weights:
            return self.weights[VALUE_HEAD]
        own = [shape for shape in self.units.get(HEAD, {}).values() if len(shape) == 2]
        return own[0] if own else self._embedding

    @cached_property
    def heads(self) -> int:
        return self._size("num_attention_heads", "n_head") or 1

    @cached_property
    def attention(self) -> int:
        """Return the width of all queries of a token."""
        return self.heads * (self._size("head_dim") or self.hidden // self.heads)

    @cached_property
    def key_values(self) -> int:
        """Return the width of all keys of a token in one layer, which is also the width of all values."""
        return self.attention // self.heads * self.key_heads

    @cached_property
    def key_heads(self) -> int:
        return self._size("num_key_value_heads") or self.heads

    @cached_property
    def windows(self) -> list[int | None]:
        """Return the sliding window of each layer in tokens; None for attention to all tokens before a token."""
        window = self._size("sliding_window") if self.config.get("use_sliding_window", True) else None
        kinds, layers = self.config.get("layer_types"), len(self.layers)
        if isinstance(kinds, list) and len(kinds) == layers:
            slides = [kind == "sliding_attention" for kind in kinds]
        else:
            full_every = self._size("sliding_window_pattern") or FULL_EVERY.get(str(self.config.get("model_type")), 0)
            first = self._size("max_window_layers") or 0
            slides = [layer >= first and not (full_every and (layer + 1) % full_every == 0) for layer in range(layers)]
        return [window if each else None for each in slides]

    @cached_property
    def inner(self) -> int:
        """Return the width of the feed-forward part, over all experts of a token."""
        experts = self._size("num_experts_per_tok")
        width = self._size("moe_intermediate_size") if experts else None
        return (experts or 1) * (width or self._size("intermediate_size", "ffn_dim", "n_inner") or 4 * self.hidden)

    @cached_property
    def gated(self) -> bool:
        """Return whether the feed-forward part is gated: has gate, up and down matrices."""
        if self._size("num_experts_per_tok"):
            return True
        of_inner = (shape for shape in self._widest_layer.values() if {self.inner, 2 * self.inner} & set(shape))
        return sum(math.prod(shape) for shape in of_inner if len(shape) == 2) >= 3 * self.inner * self.hidden

    @cached_property
    def activation(self) -> str:
        names = ("hidden_activation", "hidden_act", "activation_function")
        return next((str(self.config[name]) for name in names if self.config.get(name)), "silu")

    @cached_property
    def norms(self) -> list[tuple[int, bool]]:
        """Return, per norm in a layer, the width per token, and True for a LayerNorm (with bias), False for RMSNorm."""
        layer = self._widest_layer
        widths = {name: self._norm_width(name) or layer[name][0] for name in self._norm_weights}
        return [(width, name.removesuffix("weight") + "bias" in layer) for name, width in widths.items()]

    @property
    def norms_within_attention(self) -> list[int]:
        """Return the widths per token of the norms of queries and keys."""
        return [width for name in self._norm_weights if (width := self._norm_width(name))]

    @property
    def _norm_weights(self) -> list[str]:
        layer = self._widest_layer
        return [name for name, shape in layer.items() if len(shape) == 1 and re.search(r"(norm|ln\w*)\.weight$", name)]

    def _norm_width(self, name: str) -> int | None:
        return self.attention if "q_norm" in name else self.key_values if "k_norm" in name else None

    @cached_property
    def _widest_layer(self) -> Shapes:
        return max(self.layers, key=lambda weights: sum(map(math.prod, weights.values())), default={})

    def with_value_head(self) -> "ModelShapes":
        """Return the model with a value head (one output, with bias) instead of its own: a critic."""
        body = {name: shape for name, shape in self.weights.items() if not is_head(name)}
        return replace(self, weights=body | {VALUE_HEAD: (1, self.hidden), "score.bias": (1,)})

    def _size(self, *names: str) -> int | None:
        """Return the first positive value of these settings; of a list with a value per layer, the largest value."""
        for name in names:
            given = self.config.get(name)
            sizes = [size for size in (given if isinstance(given, list) else [given]) if isinstance(size, int)]
            if (largest := max(sizes, default=0)) > 0:
                return largest
        return None


def is_head(name: str) -> bool:
    return name.split(".")[0] in ("lm_head", "embed_out", "output")


def with_experts_fused(weights: Shapes) -> Shapes:
    """Return `weights` with a layer's experts stacked by shape to [experts, rows of an expert's matrices, columns].

    transformers stacks experts in this way when it loads files that store each expert separately.
    """
    kept: dict[str, tuple[int, ...]] = {}
    stacks: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in weights.items():
        expert = EXPERT.match(name)
        if expert is None or len(shape) != 2:
            kept[name] = shape
        else:
            stacks.setdefault((expert[1], shape), []).append(expert[2])
    for (layer, (rows, columns)), matrices in stacks.items():
        kinds = sorted(set(matrices))
        kept[f"{layer}.{'+'.join(kinds)}"] = (len(matrices) // len(kinds), len(kinds) * rows, columns)
    return kept


def shapes_from_files(path: str, revision: str | None = None) -> ModelShapes | None:
    """Return the model of a folder or the Hub's cache, from the headers of its files; None without headers."""
    folder = model_folder(path, revision)
    config = None if folder is None else read_config(folder)
    weights = {} if folder is None else with_experts_fused(tensor_shapes(folder))
    if config is None or not weights:
        return None
    # Older files of GPT-2 contain masks, which are not weights.
    weights = {name: shape for name, shape in weights.items() if shape[:2] != (1, 1) or len(shape) != 4}
    found = ModelShapes(weights, config)
    if config.get("tie_word_embeddings") and found.has_own_head:
        weights = {name: shape for name, shape in weights.items() if not is_head(name)}
    return ModelShapes(weights, config)


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the text model's settings from config.json in `folder`; None if the file cannot be read."""
    config = read_object(folder / "config.json")
    return None if config is None else text_part(config)
