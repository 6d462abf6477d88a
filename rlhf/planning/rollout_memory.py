"""Counts the memory of rollout engines: weights, cache, logits, and weight sync."""

import math
from dataclasses import dataclass

from rlhf.config import DataConfig, RolloutConfig
from rlhf.config.buffer_sizes import GATHER_BUCKET, PREFILL_TOKENS, PUSH_BUCKET, grown_cache
from rlhf.config.derived import longest_sample
from rlhf.planning.activations import pass_cost
from rlhf.planning.adapter_state import Adapted
from rlhf.planning.model_shapes import ModelShapes
from rlhf.planning.training_state import WIDTHS

ENGINE_BASE = 1 << 30
"""Estimate of the memory that vLLM keeps on a GPU besides weights and cache, even while it sleeps: 1 GiB for CUDA
graphs and the libraries' buffers."""
LARGE_GPU, PROFILED_TOKENS = 70 << 30, (16384, 8192)
"""vLLM's default `max_num_batched_tokens` on GPUs of at least 70 GiB, and on smaller GPUs. Before vLLM allocates the
cache, it measures the memory of the activations in a pass of this size."""
LARGEST_SHARE = 0.9


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on a rank's device by phase, and on its host."""

    generating: dict[str, int]
    resident: dict[str, int]
    """Bytes while the ranks train."""
    syncing: dict[str, int]
    host: int = 0
    cached_tokens: int | None = None
    """Tokens that fit into the cache; None if the engine allocates on demand or runs in servers."""
    share: float | None = None
    """vLLM's fraction of the GPU; None for other engines, on a CPU, or if the GPU's memory is unknown."""


def token_bytes(model: ModelShapes, rollout: RolloutConfig) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    return 2 * len(model.layers) * model.key_values * WIDTHS[rollout.engine_dtype]


def vllm_token_bytes(model: ModelShapes, rollout: RolloutConfig, longest: int) -> int:
    """Return the bytes of a token in a vLLM device's cache, averaged over a sample of `longest` tokens.

    A layer with a sliding window keeps only the window's tokens. The devices of an engine split the key heads. If there
    are more devices than key heads, the extra devices store copies.
    """
    kept = sum(min(longest, window or longest) for window in model.windows)
    devices = min(rollout.tensor_model_parallel_size, model.key_heads)
    return math.ceil(2 * kept * model.key_values * WIDTHS[rollout.engine_dtype] / (longest * devices))


def free_share(device_memory: int, taken: int) -> float:
    """Return the fraction of the memory that `taken` bytes and a tenth of slack leave, in steps of 0.05 from 0.05."""
    share = math.floor(20 * (LARGEST_SHARE - taken / device_memory)) / 20
    return min(max(share, 0.05), LARGEST_SHARE)


def engine_memory(
    model: ModelShapes,
    rollout: RolloutConfig,
    data: DataConfig,
    samples: int,
    ranks: int,
    attention: str,
    device_memory: int | None,
    taken: int,
    policy: Adapted | None = None,
) -> EngineMemory:
    """Return the memory of the engine `rollout.name` on a rank that generates `samples` samples at once.

    Args:
        device_memory: bytes of a GPU; None on a CPU, or if unknown.
        taken: bytes of everything else on the GPU while vLLM's cache is allocated.
        policy: the policy with adapters, if `model` is its base.
    """
    synced = _weight_sync(model, WIDTHS[rollout.engine_dtype], ranks)
    native = policy is not None and rollout.lora == "native"
    if policy is not None:
        synced = _adapter_sync(policy, synced, ranks, merged=not native)
    if rollout.name == "embedded":
        weights = {"engine weights": WIDTHS[rollout.engine_dtype] * model.count}
        moment = _embedded(model, rollout, data, samples, attention)
        return EngineMemory(weights | moment, weights, weights | {"weight sync": synced})
    if rollout.name == "vllm_server":
        synced += 3 * PUSH_BUCKET
        return EngineMemory({}, {}, {"weight sync": synced})
    tensor_parallel = rollout.tensor_model_parallel_size
    count = model.count + (policy.count if policy is not None and native else 0)
    weights_bytes = math.ceil(WIDTHS[rollout.engine_dtype] * count / tensor_parallel)
    longest = longest_sample(data)
    per_token = vllm_token_bytes(model, rollout, longest)
    syncing, share = {"engine weights": weights_bytes}, None
    generating = dict(syncing)
    if device_memory is None:
        cache = rollout.max_num_seqs * longest * per_token
    else:
        share = rollout.gpu_memory_utilization or free_share(device_memory, taken)
        syncing["engine graphs and buffers"] = ENGINE_BASE
        generating = syncing | {"engine passes": _profiled(model, rollout, PROFILED_TOKENS[device_memory < LARGE_GPU])}
        cache = max(0, int(share * device_memory) - sum(generating.values()))
    generating["engine cache"] = cache
    sleeps = rollout.sleep_level > 0 and device_memory is not None
    return EngineMemory(
        generating,
        {"engine asleep": ENGINE_BASE} if sleeps else generating,
        (syncing if sleeps else generating) | {"weight sync": synced},
        weights_bytes if sleeps and (rollout.sleep_level == 1 or native) else 0,
        cache // max(per_token, 1),
        share,
    )


def _profiled(model: ModelShapes, rollout: RolloutConfig, tokens: int) -> int:
    """Return the bytes of the larger of vLLM's two profiled passes: a layer's activations, and the sampler's logits."""
    width, devices = WIDTHS[rollout.engine_dtype], rollout.tensor_model_parallel_size
    layer = width * (3 * model.hidden + math.ceil((3 * model.inner + model.attention) / devices))
    return max(tokens * layer, 3 * 4 * rollout.max_num_seqs * model.vocabulary)


def _weight_sync(model: ModelShapes, width: int, ranks: int) -> int:
    """Return the bytes of sent parts, received parts and gathered tensors. A single rank only casts."""
    largest = width * max(map(math.prod, model.weights.values()), default=0)
    if ranks == 1:
        return largest if width < 4 else 0
    return 3 * max(GATHER_BUCKET, largest)


def _adapter_sync(policy: Adapted, synced: int, ranks: int, *, merged: bool) -> int:
    """Return bytes of gathered adapters, and of merging one weight in float32: base, product, sum and cast."""
    adapters = 4 * policy.count if ranks > 1 or not merged else 0
    largest = max((columns * rows for columns, rows in policy.linear), default=0)
    return adapters + max(synced, (policy.base_width + 8 + 4) * largest if merged else 0)


def _embedded(
    model: ModelShapes, rollout: RolloutConfig, data: DataConfig, samples: int, attention: str
) -> dict[str, int]:
    width, prompt, response = WIDTHS[rollout.engine_dtype], data.max_prompt_length, data.max_response_length
    rows = min(rollout.max_num_seqs, samples)
    per_token = token_bytes(model, rollout)
    columns = cache_columns(prompt, response)
    prompts = math.ceil(rows / rollout.n)
    prefill = min(max(PREFILL_TOKENS, prompt), prompts * prompt)
    # The cache grows layer by layer, so one layer at a time has both its old and its new columns. The keys of a
    # prefilled prompt stay until each of its samples has a row.
    cache = per_token * (rows * columns + prefill) + per_token * rows * columns // max(len(model.layers), 1)
    float32 = 2 + (rollout.temperature != 1)
    return {
        "engine cache": cache,
        "engine passes": pass_cost(model, width, attention).forward(prefill, prompt),
        "engine logits": rows * model.vocabulary * (width + 4 * float32) + 12 * samples * response,
    }


def cache_columns(prompt: int, response: int) -> int:
    """Return the columns of the embedded engine's cache for samples of full length."""
    columns = prompt
    while columns < prompt + response:
        columns = grown_cache(columns, response)
    return columns
