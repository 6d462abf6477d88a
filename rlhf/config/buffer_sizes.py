"""Sizes of buffers that are not settings. The trainer allocates them, and the memory plan counts them."""

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Most logits (tokens times vocabulary) of a chunk, by type of device.

The CPU's value is the fastest one. The GPU's leaves 440 tokens of a vocabulary of 152k, enough for matrix products at
full speed. A chunk has at least one token."""
GATHER_BUCKET = 8 << 20
"""Bytes of tensors that one all-gather collects. A larger tensor is gathered by itself. On a CPU a larger bucket is
slower, because it no longer fits into the caches."""
PUSH_BUCKET = 256 << 20
"""Bytes of weights that are gathered, cast and sent to the rollout servers together."""
REDUCE_BUCKET = 500_000_000
"""Most elements of gradients in one all-reduce of DeepSpeed."""
PREFILL_TOKENS = 16384
"""Most prompt tokens, padding included, in one prefill of the embedded engine. Bounds the activations."""


def grown_cache(columns: int, max_tokens: int) -> int:
    """Return the new number of columns of the embedded engine's KV cache when all `columns` are in use.

    The cache grows by half (at least 64 columns), but not by more than a whole response (`max_tokens`).
    """
    return columns + min(max_tokens, max(64, columns // 2))
