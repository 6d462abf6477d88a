"""Counts the memory of a forward and backward pass: activations kept by autograd, and transients.

With the modeling code of transformers 5, autograd keeps the input of a matrix product; input and output of an
activation function; the float32 input, the normalized values and the output of an RMSNorm; queries, keys, values and
the output of fused attention (Dao, arXiv 2307.08691, algorithm 1). A test compares these counts with the tensors that
`torch.autograd.graph.saved_tensors_hooks` reports.
"""

from dataclasses import dataclass

from rlhf.config.buffer_sizes import CHUNK_ELEMENTS, HEAD_GRADIENT_BYTES
from rlhf.planning.model_shapes import ModelShapes

CHUNK_COPIES = 3
"""Number of float32 tensors of a chunk's size that exist at the same time."""
PACKED = "sdpa_by_sequence"
"""Implementation that replaces `sdpa` for packed sequences (`rlhf.models.sequence_attention`)."""
STEPWISE = ("gelu_new", "gelu_fast", "quick_gelu")
"""Activation functions made of several operations, which keep four tensors besides the output."""
FLOAT32_WEIGHTS = ("gemma", "olmo")
"""Model families whose norms have float32 weights, and so keep the normalized values in float32."""


@dataclass(frozen=True)
class TokenCost:
    """Bytes per token and layer that adapters add to the cost of the model."""

    kept: int = 0
    """Bytes kept for the backward pass."""
    transient: int = 0
    """Bytes freed within the pass of the layer."""


@dataclass(frozen=True)
class PassCost:
    """Bytes of a pass through a model, per token except for `pairs`."""

    kept_by_layers: int
    """Bytes that all layers together keep for the backward pass."""
    kept_by_layer: int
    inputs: int
    """Bytes of the inputs of all layers, which are kept when activations are recomputed."""
    final: int
    """Bytes that the last norm keeps, and bytes of the gradient of the hidden states."""
    transient: int
    """Bytes of temporary tensors within a layer, in addition to the kept activations."""
    pairs: int
    """Bytes that one layer keeps per pair of tokens of a sequence (`eager` only)."""

    def forward(self, tokens: int, longest: int) -> int:
        """Return the bytes of a pass without gradients over `tokens` in sequences up to `longest`."""
        return tokens * (self.transient + self.final + self.pairs * longest)

    def kept(self, tokens: int, longest: int, layers: int, *, checkpointing: bool) -> int:
        """Return the bytes of activations after the forward pass."""
        if checkpointing:
            return tokens * (self.inputs + self.final)
        return tokens * (self.kept_by_layers + self.final + layers * self.pairs * longest)

    def layer(self, tokens: int, longest: int) -> int:
        """Return the bytes of a layer's activations in its backward pass."""
        return tokens * (self.kept_by_layer + self.transient + self.pairs * longest)


def pass_cost(model: ModelShapes, width: int, attention: str, adapters: TokenCost = TokenCost()) -> PassCost:
    """Return the costs of a pass in a dtype of `width` bytes.

    Args:
        attention: `sdpa`, `eager` or `flash_attention_2`; for packed rows `sdpa_by_sequence` or `eager_by_sequence`.
        adapters: costs of adapters, if any.
    """
    norms = sum(_norm(model, size, width, layer_norm=layer_norm) for size, layer_norm in model.norms)
    # Autograd does not keep the output of norms on queries and keys, because the rotary embedding after them is linear.
    norms -= width * sum(size for size in model.norms_within_attention)
    # `eager` repeats keys and values for all heads; packed sequences copy their outputs into another tensor.
    eager = attention.startswith("eager")
    keys_and_values = 2 * (model.attention if eager else model.key_values)
    outputs = model.attention * (2 if attention == PACKED else 1)
    queries = width * (model.attention + keys_and_values + outputs) + 4 * model.heads
    inner = 4 if model.gated else 5 if model.activation in STEPWISE else 2
    layer = norms + queries + inner * model.inner * width + adapters.kept
    layers = len(model.layers)
    last_is_layer_norm = bool(model.norms) and model.norms[0][1]
    final = _norm(model, model.hidden, width, layer_norm=last_is_layer_norm) + model.hidden * width
    transient = (3 * model.inner + 3 * model.hidden) * width + adapters.transient
    # The softmax in float32 and, if different, in the dtype of the pass.
    pairs = model.heads * (4 if width == 4 else 4 + width) if eager else 0
    return PassCost(layers * layer, layer, layers * model.hidden * width, final, transient, pairs)


def _norm(model: ModelShapes, size: int, width: int, *, layer_norm: bool) -> int:
    if layer_norm:
        return 2 * size * width
    if width == 4:
        return 12 * size
    in_float32 = str(model.config.get("model_type", "")).startswith(FLOAT32_WEIGHTS)
    return (10 if in_float32 else 8) * size


def head_gradient_bytes(predicted: int, vocabulary: int, device: str) -> int:
    """Return the maximum bytes of logit gradients, stored until one product adds them to the head's gradient."""
    return min(4 * predicted * vocabulary, HEAD_GRADIENT_BYTES[device])


def chunk_bytes(predicted: int, vocabulary: int, device: str) -> int:
    """Return the bytes of a chunk of float32 logits for `predicted` tokens."""
    return 4 * CHUNK_COPIES * min(predicted * vocabulary, max(CHUNK_ELEMENTS[device], vocabulary))
