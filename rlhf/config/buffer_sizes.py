"""Defines sizes of buffers that are not settings, for the trainer and the memory plan."""

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Largest number of logits (tokens times vocabulary) that are computed at once. A chunk has at least one token, even
if one token has more logits. The CPU's value is the fastest. The GPU's value allows 440 tokens with a vocabulary of
152k, enough for matrix products at full speed."""
HEAD_GRADIENT_BYTES = {"cpu": 0, "cuda": 512 << 20}
"""Bytes of logits' gradients to collect from several chunks for one product with the hidden states. The product is
added to the head's gradient; 0 adds each chunk's product at once. On a GPU, adding to the whole float32 gradient costs
more than the product of one chunk."""
GATHER_BUCKET = 8 << 20
"""Bytes of tensors per all-gather; a larger tensor gets an all-gather of its own. On a CPU, a larger bucket is slower,
because the bucket does not fit into the caches."""
PUSH_BUCKET = 256 << 20
"""Bytes of weights that are gathered, cast and sent to the rollout servers together."""
GRADIENT_BUCKET = 32 << 20
"""Bytes of gradients in one all-reduce over the replicas; a larger gradient gets an all-reduce of its own."""
REDUCE_BUCKET = 500_000_000
"""Largest number of gradient elements in one all-reduce of DeepSpeed."""
PREFILL_TOKENS = 16384
"""Largest number of prompt tokens, padding included, in one prefill of the embedded engine. Bounds the activations."""


def grown_cache(columns: int, max_tokens: int) -> int:
    """Return the new number of columns of the embedded engine's KV cache when all `columns` are in use.

    The cache grows by half (at least 64 columns), but not by more than `max_tokens`, a whole response.
    """
    return columns + min(max_tokens, max(64, columns // 2))
