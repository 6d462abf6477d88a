"""Section `rollout`: the engine that generates and how samples are drawn."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting


@dataclass
class ValKwargsConfig:
    temperature: float = setting(0.0, ge=0, resume="harmless")
    """0 is greedy."""
    top_p: float = setting(1.0, gt=0, le=1, resume="harmless")
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = setting(-1, ge=-1, resume="harmless")
    """Sample from the k likeliest tokens; -1 or 0 from all."""
    min_p: float = setting(0.0, ge=0, le=1, resume="harmless")
    """Sample from the tokens with at least this share of the likeliest one's probability; 0 from all."""
    repetition_penalty: float = setting(1.0, ge=0.01, le=100.0, resume="harmless")
    """See `rollout.repetition_penalty`; greedy responses have it, too."""
    n: int = setting(1, ge=1, resume="harmless")
    """Samples per held-out prompt; the accuracy is their mean."""


@dataclass
class EngineKwargsConfig:
    vllm: dict[str, Any] = setting({})
    """vLLM's own engine arguments by their Python names, e.g. {kv_cache_dtype: fp8, max_num_batched_tokens: 8192}; they
    win over ours."""


@dataclass
class ServersConfig:
    urls: list[str] = setting([], resume="harmless")
    """Servers that run already, e.g. [http://node7:8000]; started with `python -m rlhf.rollout.servers`. Empty: we
    start our own."""
    count: int = setting(1, ge=1, resume="harmless")
    """Servers that we start, beside the first rank."""
    start_timeout_s: float = setting(600.0, gt=0, resume="harmless")
    """A server that does not answer so long after its start counts as dead."""
    answer_timeout_s: float = setting(300.0, gt=0, resume="harmless")
    """A server that has requests and for so long neither answers one nor computes a token counts as hung."""
    max_failures: int = setting(5, ge=0, resume="harmless")
    """Failures of servers in a row, without a finished request between them, before the run gives up."""
    backoff_s: float = setting(1.0, ge=0, resume="harmless")
    """Wait before a server that failed is tried again; doubles with each failure in a row."""
    backoff_max_s: float = setting(60.0, ge=0, resume="harmless")
    """Longest such wait, in seconds."""


@dataclass
class RolloutConfig:
    name: str | None = setting("embedded", choices=("embedded", "vllm", "vllm_server"), by_device=True)
    """The engine that generates: `embedded` comes with the trainer, `vllm` shares its devices, `vllm_server` has its
    own; null means `vllm` on CUDA where it is installed, otherwise `embedded`."""
    n: int = setting(8, ge=1)
    """Samples per prompt: the group of GRPO."""
    temperature: float = setting(1.0, ge=0)
    """At least 0.01: greedy samples have no distribution to train."""
    top_p: float = setting(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = setting(-1, ge=-1)
    """Sample from the k likeliest tokens; -1 or 0 from all."""
    min_p: float = setting(0.0, ge=0, le=1)
    """Sample from the tokens with at least this share of the likeliest one's probability; 0 from all."""
    repetition_penalty: float = setting(1.0, ge=0.01, le=100.0)
    """Divides the logits of the tokens that the prompt or the response has already (multiplies negative ones); 1 is
    none, more is fewer repetitions."""
    stop: list[str] = setting([])
    """Strings that end a sample; the tokens that complete one are kept."""
    ignore_eos: bool = setting(False)
    """Go on to `data.max_response_length` whatever the policy says (for benchmarks)."""
    max_num_seqs: int = setting(256, ge=1, resume="harmless")
    """Samples that one rank decodes together."""
    log_prob_max_token_len_per_gpu: int | None = setting(None, ge=1, resume="harmless")
    """Tokens per forward pass on one rank, for the log-probs of the samples before the update; null takes
    `actor.ppo_max_token_len_per_gpu`."""
    dtype: str | None = setting("float32", choices=("float32", "bfloat16", "float16"), by_device=True)
    """Precision of the engine's weights and cache; null means bfloat16 on CUDA, float32 on a CPU."""
    tensor_model_parallel_size: int = setting(1, ge=1)
    """Devices that one vLLM engine is spread over."""
    gpu_memory_utilization: float = setting(0.5, gt=0, le=1, resume="harmless")
    """Share of a GPU's memory (on a CPU: of the machine's) that vLLM may take for weights and cache."""
    enforce_eager: bool = setting(False)
    """vLLM without CUDA graphs: slower, less memory. On a CPU always."""
    sleep_level: int = setting(2, ge=0, le=2, resume="harmless")
    """Memory that `vllm` gives back while the ranks train: 0 nothing, 1 weights (kept in the CPU's memory) and cache, 2
    both, for good."""
    lora: str = setting("merged", choices=("merged", "native"))
    """Way of adapters (`model.lora`) into the engine: `merged` sends whole weights, base and adapter in one; `native`
    sends the adapters alone, which vLLM applies in each pass beside the base that it keeps."""
    structured_outputs: dict[str, Any] = setting({})
    """Form of the responses, as vLLM's StructuredOutputsParams: {json: ...}, {regex: ...}, {choice: [...]}, {grammar:
    ...}."""
    async_steps: int = setting(0, ge=0, le=1)
    """1: while a step trains, `vllm_server` generates the next one's batch, with weights that are one step old by
    then."""
    engine_kwargs: EngineKwargsConfig = setting(EngineKwargsConfig)
    servers: ServersConfig = setting(ServersConfig)
    val_kwargs: ValKwargsConfig = setting(ValKwargsConfig)

    @property
    def engine_dtype(self) -> str:
        """`dtype` of a composed configuration, in which it is a name."""
        assert self.dtype is not None
        return self.dtype
