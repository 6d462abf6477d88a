"""Checks the settings of the rollout engines."""

from collections.abc import Iterator
from dataclasses import fields
from urllib.parse import urlsplit

from rlhf.config import Config, RolloutConfig
from rlhf.config.rules.without_effect import without_effect
from rlhf.config.schema.rollout import ValKwargsConfig
from rlhf.config.vllm_versions import installation_problem
from rlhf.errors import did_you_mean, nearest

STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Keys of rollout.structured_outputs; exactly one must be set."""
STRUCTURE_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
LEAST_TEMPERATURE = 0.01
"""vLLM raises smaller temperatures, except 0, to this value, because logits / temperature may overflow below it."""
MOST_KEPT = 2048
"""Largest top_k with sampling masks: 8 KiB per token in each copy of a batch. vLLM returns masks up to this size as
lists of ids (MAX_COMPACT_SUPPORT, 0.32), and needs a bit for each token of the vocabulary for larger masks."""
VLLM_ARGUMENTS_WITH_SETTINGS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "rollout.dtype",
    "seed": "trainer.seed",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "max_num_seqs": "rollout.max_num_seqs",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.sleep_level",
    "pipeline_parallel_size": "rollout.tensor_model_parallel_size",
    "data_parallel_size": "trainer.nproc or rollout.servers.count",
}
"""Maps vLLM's engine arguments to the settings that control them."""
RESERVED_VLLM_ARGUMENTS = (
    "api_key",
    "disable_log_stats",
    "distributed_executor_backend",
    "enable_lora",
    "enable_return_routed_experts",
    "generation_config",
    "host",
    "load_format",
    "logprobs_mode",
    "middleware",
    "override_generation_config",
    "port",
    "return_sampling_mask",
    "skip_tokenizer_init",
    "trust_remote_code",
    "weight_transfer_config",
    "worker_cls",
    "worker_extension_cls",
)
"""vLLM's engine arguments that only the trainer may set."""
ONLY_VLLM = (
    "rollout.tensor_model_parallel_size",
    "rollout.structured_outputs",
    "rollout.gpu_memory_utilization",
    "rollout.enforce_eager",
    "rollout.engine_kwargs.vllm",
)
"""Settings that the embedded engine does not read."""


def _equal_samples(prefix: str, kwargs: RolloutConfig | ValKwargsConfig) -> Iterator[str]:
    for key, value, remedy in (("top_k", 1, -1), ("min_p", 1, 0)):
        if kwargs.n > 1 and getattr(kwargs, key) == value:
            yield (
                f"{prefix}.{key}={value}: the {kwargs.n} samples of a prompt ({prefix}.n) would be equal; set "
                f"{prefix}.{key}={remedy}, or {prefix}.n=1."
            )


def rollout_problems(config: Config) -> Iterator[str]:
    r = config.rollout
    if r.temperature < LEAST_TEMPERATURE:
        yield (
            f"rollout.temperature={r.temperature:g}: sampling would be greedy or nearly greedy, and "
            "samples of a prompt would hardly differ; set rollout.temperature=1.0. For evaluations, set "
            "rollout.val_kwargs.temperature instead."
        )
    val = r.val_kwargs
    if val.n > 1 and val.temperature < LEAST_TEMPERATURE:
        yield (
            f"rollout.val_kwargs.temperature={val.temperature:g}: the {val.n} samples of a held-out prompt "
            "(rollout.val_kwargs.n) would be equal; set rollout.val_kwargs.temperature=1.0, or rollout.val_kwargs.n=1."
        )
    yield from (*_equal_samples("rollout", r), *_equal_samples("rollout.val_kwargs", val))
    if "" in r.stop:
        yield f"rollout.stop={r.stop}: an empty stop string would end each sample at once; remove it."
    if r.name == "embedded":
        yield from without_effect(
            config, ONLY_VLLM, "rollout=vllm or rollout=vllm_server", r.name, remedy="rollout=vllm"
        )
    else:
        yield from _vllm(config)
    if r.name != "vllm":
        yield from without_effect(config, ["rollout.sleep_level"], "rollout=vllm", r.name)
    if r.name == "vllm":
        needed = "rollout=vllm_server or rollout=embedded"
        yield from without_effect(config, ["rollout.sampling_mask"], needed, r.name, remedy="rollout=vllm_server")
    elif r.sampling_mask:
        yield from _sampling_mask(config)
    if r.async_steps:
        yield from _asynchronous(config)
    yield from _servers(config)


def missing_engine(config: Config) -> Iterator[str]:
    r = config.rollout
    own = r.name == "vllm" or (r.name == "vllm_server" and not r.servers.urls)
    if own and (problem := installation_problem()):
        yield f"rollout={r.name}: {problem}"


def _sampling_mask(config: Config) -> Iterator[str]:
    r, shown = config.rollout, "rollout.sampling_mask=true"
    if r.top_k <= 0 and r.top_p == 1 and r.min_p == 0:
        yield f"{shown}: no sampling setting excludes tokens; set rollout.sampling_mask=false, or rollout.top_k=50."
    elif r.top_k <= 0:
        yield (
            f"rollout.top_k={r.top_k}: {shown} stores up to rollout.top_k tokens with each sampled token, so it needs "
            "a bound; set rollout.top_k=50, or rollout.sampling_mask=false."
        )
    elif r.n == 1 and (r.top_k == 1 or r.min_p == 1):
        name, value = ("top_k", 1) if r.top_k == 1 else ("min_p", 1)
        yield (
            f"rollout.{name}={value}: with {shown} each mask has a single token, and nothing can be learned from its "
            "probability, 1; set rollout.top_k=50 and rollout.min_p=0."
        )
    # vLLM's servers return masks of all samples; those of evaluations have no use, but the servers send them as well.
    evaluated = r.val_kwargs.top_k if r.name == "vllm_server" and r.val_kwargs.temperature > 0 else 0
    for name, value in (("top_k", r.top_k), ("val_kwargs.top_k", evaluated)):
        if value > MOST_KEPT:
            yield (
                f"rollout.{name}={value}: with {shown} each token needs memory for {value} kept tokens, and at most "
                f"{MOST_KEPT} are possible; set rollout.{name}=50, or rollout.sampling_mask=false."
            )
    if r.repetition_penalty != 1:
        yield (
            f"rollout.repetition_penalty={r.repetition_penalty:g}: the update ignores it, so {shown} would not remove "
            "the bias; set rollout.repetition_penalty=1, or rollout.sampling_mask=false."
        )
    if r.name == "vllm_server" and r.val_kwargs.temperature > 0 and r.val_kwargs.top_k <= 0:
        yield (
            f"rollout.val_kwargs.top_k={r.val_kwargs.top_k}: with {shown} vLLM's servers reject requests without "
            "top_k; set rollout.val_kwargs.top_k=50, or rollout.val_kwargs.temperature=0."
        )
    if r.name == "vllm_server" and config.trainer.device == "cpu" and not r.servers.urls:
        yield f"{shown}: vLLM returns sampling masks only on GPUs, but trainer.device=cpu; set rollout=embedded."


def _asynchronous(config: Config) -> Iterator[str]:
    steps, name = config.rollout.async_steps, config.rollout.name
    ahead, correction = f"rollout.async_steps={steps}", config.algorithm.rollout_correction
    if name == "vllm":
        yield (
            f"{ahead}: vLLM in the ranks ends each generation before training; set rollout=vllm_server or "
            "rollout=embedded instead of vllm, or rollout.async_steps=0."
        )
    if correction.rollout_is is None and not config.env.used:
        yield (
            f"algorithm.rollout_correction.rollout_is=null: with {ahead} samples come from an older policy than the "
            "one in training; set algorithm.rollout_correction.rollout_is=token."
        )
    if config.rollout.structured_outputs:
        yield (
            f"rollout.structured_outputs={config.rollout.structured_outputs}: with {ahead} a response continues after "
            "a weight sync as a new request, whose structure would begin again; set rollout.async_steps=0."
        )
    bound = config.rollout.max_staleness
    if bound is not None and bound < steps:
        yield (
            f"rollout.max_staleness={bound}: with {ahead} tokens are up to {steps} steps old when they are trained on; "
            f"set rollout.max_staleness={steps}, or rollout.async_steps={bound}."
        )


def _servers(config: Config) -> Iterator[str]:
    name, s = config.rollout.name, config.rollout.servers
    if name != "vllm_server":
        keys = (f"rollout.servers.{field.name}" for field in fields(s))
        yield from without_effect(config, keys, "rollout=vllm_server", name)
        return
    for url in s.urls:
        if not _is_http(url):
            yield f"rollout.servers.urls: {url!r} is not the URL of a server; give e.g. http://node7:8000."
    named = [url.rstrip("/") for url in s.urls]
    for url in sorted({url for url in named if named.count(url) > 1}):
        yield f"rollout.servers.urls: {url} is listed {named.count(url)} times; list each server once."
    if s.urls:
        yield from without_effect(config, ["rollout.servers.count"], "rollout.servers.urls=[]")
    if s.backoff_s > s.backoff_max_s:
        yield (
            f"rollout.servers.backoff_s={s.backoff_s:g}: is more than "
            f"rollout.servers.backoff_max_s={s.backoff_max_s:g}; "
            f"set rollout.servers.backoff_max_s={s.backoff_s:g}, or a smaller backoff_s."
        )


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False


def _vllm(config: Config) -> Iterator[str]:
    r = config.rollout
    if config.model.trust_remote_code and not r.servers.urls:
        yield (
            f"model.trust_remote_code=true: rollout={r.name} receives the policy's configuration and tokenizer, not "
            "its code; set rollout=embedded, or model.trust_remote_code=false for an architecture that transformers "
            "and vLLM support."
        )
    for key, temperature in (("temperature", r.temperature), ("val_kwargs.temperature", r.val_kwargs.temperature)):
        if temperature > 2 or 0 < temperature < LEAST_TEMPERATURE:
            yield f"rollout.{key}={temperature}: must be 0 (greedy), or {LEAST_TEMPERATURE} to 2, for vLLM."
    for key, value in r.engine_kwargs.vllm.items():
        shown = f"rollout.engine_kwargs.vllm.{key}={value}"
        if key in VLLM_ARGUMENTS_WITH_SETTINGS:
            yield f"{shown}: set {VLLM_ARGUMENTS_WITH_SETTINGS[key]} instead."
        elif key in RESERVED_VLLM_ARGUMENTS:
            yield f"{shown}: only the trainer may set this argument; remove it."
    yield from _structure(r)


def _structure(r: RolloutConfig) -> Iterator[str]:
    shown = f"rollout.structured_outputs={r.structured_outputs}"
    unknown = set(r.structured_outputs) - {*STRUCTURES, *STRUCTURE_OPTIONS}
    for key in sorted(unknown):
        known = (*STRUCTURES, *STRUCTURE_OPTIONS)
        yield f"{shown}: there is no key {key}.{did_you_mean(nearest(key, known))} Keys: {', '.join(known)}."
    if r.structured_outputs and not unknown and len(set(r.structured_outputs) & set(STRUCTURES)) != 1:
        yield f"{shown}: set exactly one of {', '.join(STRUCTURES)}."
