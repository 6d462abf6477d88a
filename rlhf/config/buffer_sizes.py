"""Sizes of buffers that are not settings: the trainer allocates by them, the memory plan counts with them."""

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Logits of a chunk at most, by kind of device: on a CPU what it is fastest with, on a GPU enough tokens (440 of a
vocabulary of 152k) for matrix products at its full speed. A chunk has at least one token."""
GATHER_BUCKET = 8 << 20
"""Bytes up to which tensors are gathered together; a larger one goes by itself. Larger buckets are slower on a CPU,
whose caches they leave."""
PUSH_BUCKET = 256 << 20
"""Bytes of weights that go to rollout servers at a time."""
REDUCE_BUCKET = 500_000_000
"""Elements of gradients that DeepSpeed reduces together at most."""
PREFILL_TOKENS = 16384
"""Padded prompt tokens of one prefill of the embedded engine: bounds its activations."""


def grown_cache(columns: int, max_tokens: int) -> int:
    """Columns of the embedded engine's cache once its `columns` are full: half as many again, or what the longest
    response (`max_tokens`) still needs."""
    return columns + min(max_tokens, max(64, columns // 2))
