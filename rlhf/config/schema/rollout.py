"""Section `rollout`: the rollout engine and its sampling."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting


@dataclass
class ValKwargsConfig:
    temperature: float = setting(0.0, ge=0, resume="harmless")
    """Temperature of evaluation samples; 0 is greedy."""
    top_p: float = setting(1.0, gt=0, le=1, resume="harmless")
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = setting(-1, ge=-1, resume="harmless")
    """Sample from the k likeliest tokens; -1 or 0 means all."""
    min_p: float = setting(0.0, ge=0, le=1, resume="harmless")
    """Drop tokens with less than this fraction of the likeliest token's probability; 0 drops none."""
    repetition_penalty: float = setting(1.0, ge=0.01, le=100.0, resume="harmless")
    """As `rollout.repetition_penalty`; also applies to greedy responses."""
    n: int = setting(1, ge=1, resume="harmless")
    """Samples per held-out prompt; the accuracy is their mean."""


@dataclass
class EngineKwargsConfig:
    vllm: dict[str, Any] = setting({})
    """vLLM's engine arguments by their Python names, e.g. {kv_cache_dtype: fp8, max_num_batched_tokens: 8192}; they
    override the values that the trainer sets."""


@dataclass
class ServersConfig:
    urls: list[str] = setting([], resume="harmless")
    """URLs of running servers, e.g. [http://node7:8000], started with `python -m rlhf.rollout.servers`. Empty: the
    trainer starts servers."""
    count: int = setting(1, ge=1, resume="harmless")
    """Servers that the trainer starts, on the machine of the first rank."""
    start_timeout_s: float = setting(600.0, gt=0, resume="harmless")
    """Seconds from a server's start to its first answer; after that the server counts as dead."""
    answer_timeout_s: float = setting(300.0, gt=0, resume="harmless")
    """Seconds without an answer or a computed token, with requests pending, after which a server counts as hung."""
    max_failures: int = setting(5, ge=0, resume="harmless")
    """Largest number of server failures in a row, without a finished request; one more fails the attempt."""
    backoff_s: float = setting(1.0, ge=0, resume="harmless")
    """Seconds before retrying a failed server; doubles with each failure in a row."""
    backoff_max_s: float = setting(60.0, ge=0, resume="harmless")
    """Largest backoff in seconds."""


@dataclass
class RolloutConfig:
    name: str | None = setting("embedded", choices=("embedded", "vllm", "vllm_server"), by_device=True)
    """Rollout engine: `embedded` (built in), `vllm` (shares the trainer's devices), or `vllm_server` (has its own
    devices). null means `vllm` on CUDA if installed, else `embedded`."""
    n: int = setting(8, ge=1)
    """Samples per prompt (GRPO's group size)."""
    temperature: float = setting(1.0, ge=0)
    """Sampling temperature, at least 0.01: greedy samples have no distribution to train."""
    top_p: float = setting(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = setting(-1, ge=-1)
    """Sample from the k likeliest tokens; -1 or 0 means all."""
    min_p: float = setting(0.0, ge=0, le=1)
    """Drop tokens with less than this fraction of the likeliest token's probability; 0 drops none."""
    repetition_penalty: float = setting(1.0, ge=0.01, le=100.0)
    """Divides positive and multiplies negative logits of tokens already in the prompt or response; 1 has no effect;
    with more, the policy repeats itself less."""
    sampling_mask: bool = setting(False)
    """Compute log-probs over the tokens that `min_p`, `top_k` and `top_p` kept. Needs `top_k`."""
    stop: list[str] = setting([])
    """Strings that end a response; the response keeps the tokens of the string."""
    ignore_eos: bool = setting(False)
    """Generate until `data.max_response_length` even after end-of-sequence (for benchmarks)."""
    max_num_seqs: int = setting(256, ge=1, resume="harmless")
    """Samples that one rank or vLLM engine decodes at the same time."""
    log_prob_max_token_len_per_gpu: int | None = setting(None, ge=1, resume="harmless")
    """Tokens per forward pass on one rank, for log-probs before the update; null means
    `actor.ppo_max_token_len_per_gpu`."""
    dtype: str | None = setting("float32", choices=("float32", "bfloat16", "float16"), by_device=True)
    """Dtype of the engine's weights and cache; null means bfloat16 on CUDA, float32 on a CPU."""
    tensor_model_parallel_size: int = setting(1, ge=1)
    """Devices per vLLM engine (tensor parallelism)."""
    gpu_memory_utilization: float | None = setting(None, gt=0, le=1, resume="harmless")
    """Fraction of a GPU's memory (on a CPU: of the machine's) that vLLM may use for weights and cache. null: `vllm`
    uses the memory that training leaves free according to `python -m rlhf.plan`, or 0.5 without such an estimate;
    servers use vLLM's own default."""
    enforce_eager: bool = setting(False)
    """Run vLLM without CUDA graphs: slower, less memory. Always on for a CPU."""
    sleep_level: int = setting(2, ge=0, le=2, resume="harmless")
    """GPU memory that `vllm` frees during training: 0 nothing; 1 cache, and weights after moving them to CPU memory;
    2 cache and weights without keeping a copy."""
    lora: str = setting("merged", choices=("merged", "native"))
    """Weight sync with `model.lora`: `merged` sends whole weights with adapters merged; `native` sends only adapters,
    which vLLM applies in each pass."""
    structured_outputs: dict[str, Any] = setting({})
    """Response format, as in vLLM's StructuredOutputsParams: {json: ...}, {regex: ...}, {choice: [...]}, {grammar:
    ...}."""
    async_steps: int = setting(0, ge=0)
    """Batches that generation may be ahead of training: up to `async_steps` + 1 are in flight, and a step does not wait
    for the longest response. `vllm_server` also generates during training. 0 generates the whole
    batch of a step before training on it."""
    max_staleness: int | None = setting(None, ge=0)
    """Largest age of a token in steps, from the weights that drew it to the step that trains on it. A step waits for
    responses that would be too old in the next step, and drops carried-over groups of dynamic sampling that are too old
    (0: all, as verl does). null: `async_steps`, at least 1."""
    engine_kwargs: EngineKwargsConfig = setting(EngineKwargsConfig)
    servers: ServersConfig = setting(ServersConfig)
    val_kwargs: ValKwargsConfig = setting(ValKwargsConfig)

    @property
    def vllm_share(self) -> float:
        """Return `gpu_memory_utilization`, or 0.5 if it is null because the memory plan did not set it."""
        return 0.5 if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    @property
    def engine_dtype(self) -> str:
        """Return `dtype`; composition has replaced null by the device's default."""
        assert self.dtype is not None
        return self.dtype
