"""Memory of a forward and backward pass: activations that it keeps, and what lives for a moment only.

What autograd keeps is read in the modelling code of transformers 5: the input of each product of matrices, the input
and the output of each function, of an RMSNorm its input in float32, the normalised values and the output, of a fused
attention queries, keys, values and the output (Dao, arXiv 2307.08691, algorithm 1). A test counts the same with hooks
on saved tensors.
"""

from dataclasses import dataclass

from rlhf.config.buffer_sizes import CHUNK_ELEMENTS
from rlhf.planning.model_shapes import ModelShapes

CHUNK_COPIES = 3
"""Float32 tensors of a chunk's size that are there together."""
PACKED = "sdpa_by_sequence"
"""Implementation that is in `sdpa`'s place where sequences are packed (`rlhf.models.sequence_attention`)."""
STEPWISE = ("gelu_new", "gelu_fast", "quick_gelu")
"""Functions that are made of several, each of which keeps something: four tensors beside the output."""
FLOAT32_WEIGHTS = ("gemma", "olmo")
"""Families whose norms multiply by their weights in float32, and so keep the normalised values in it."""


@dataclass(frozen=True)
class TokenCost:
    """Bytes of a token in a layer, beside those of the model's own weights."""

    kept: int = 0
    """For the backward pass."""
    moment: int = 0


@dataclass(frozen=True)
class PassCost:
    """Bytes of a pass through a model, per token unless it says otherwise."""

    by_layers: int
    """Kept by all layers for the backward pass."""
    by_layer: int
    """Kept by one layer."""
    inputs: int
    """Inputs of all layers: what is kept when a layer's activations are computed again."""
    final: int
    """Kept by the last norm, and the gradient of the hidden states."""
    moment: int
    """There for a moment within a layer, beside what it keeps."""
    pairs: int
    """Per pair of tokens of a sequence, what one layer keeps (`eager`)."""

    def forward(self, tokens: int, longest: int) -> int:
        """Bytes of a pass without gradients over `tokens` in sequences up to `longest`."""
        return tokens * (self.moment + self.final + self.pairs * longest)

    def kept(self, tokens: int, longest: int, layers: int, *, checkpointing: bool) -> int:
        """Bytes of activations once the forward pass is done."""
        if checkpointing:
            return tokens * (self.inputs + self.final)
        return tokens * (self.by_layers + self.final + layers * self.pairs * longest)

    def layer(self, tokens: int, longest: int) -> int:
        """Bytes of a layer whose activations are there, in its backward pass."""
        return tokens * (self.by_layer + self.moment + self.pairs * longest)


def pass_cost(model: ModelShapes, width: int, attention: str, more: TokenCost = TokenCost()) -> PassCost:
    """The costs of a pass in a type of `width` bytes with an implementation of attention: `sdpa`, `eager`,
    `flash_attention_2`, or one of the first two `_by_sequence` in packed rows; `more` is that of adapters."""
    norms = sum(_norm(model, size, width, layer_norm=layer_norm) for size, layer_norm in model.norms)
    # What rotates queries and keys keeps neither.
    norms -= width * sum(size for size in model.norms_within_attention)
    # `eager` repeats keys and values for all heads; outputs of sequences are put together into another tensor.
    eager = attention.startswith("eager")
    keys_and_values = 2 * (model.attention if eager else model.key_values)
    outputs = model.attention * (2 if attention == PACKED else 1)
    queries = width * (model.attention + keys_and_values + outputs) + 4 * model.heads
    inner = 4 if model.gated else 5 if model.activation in STEPWISE else 2
    one = norms + queries + inner * model.inner * width + more.kept
    layers = len(model.layers)
    last_is_layer_norm = bool(model.norms) and model.norms[0][1]
    final = _norm(model, model.hidden, width, layer_norm=last_is_layer_norm) + model.hidden * width
    moment = (3 * model.inner + 3 * model.hidden) * width + more.moment
    # The softmax in float32 and, where that is another type, in the pass's.
    pairs = model.heads * (4 if width == 4 else 4 + width) if eager else 0
    return PassCost(layers * one, one, layers * model.hidden * width, final, moment, pairs)


def _norm(model: ModelShapes, size: int, width: int, *, layer_norm: bool) -> int:
    if layer_norm:
        return 2 * size * width
    if width == 4:
        return 12 * size
    in_float32 = str(model.config.get("model_type", "")).startswith(FLOAT32_WEIGHTS)
    return (10 if in_float32 else 8) * size


def chunk_bytes(predicted: int, vocabulary: int, device: str) -> int:
    """Bytes of the chunk of logits of `predicted` tokens, in float32."""
    return 4 * CHUNK_COPIES * min(predicted * vocabulary, max(CHUNK_ELEMENTS[device], vocabulary))
