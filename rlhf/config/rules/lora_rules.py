"""Checks `model.lora` against the other sections, and the installed peft."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from rlhf.config import BackendConfig, Config, LoraConfig
from rlhf.config.derived import base_dtype, compute_dtype
from rlhf.config.known_settings import SETTINGS
from rlhf.config.overrides import hydra_value
from rlhf.config.rules.backend_rules import package_problem
from rlhf.config.rules.without_effect import without_effect
from rlhf.config.schema.lora import ALL_LINEAR

ADAPTER_SETTINGS = (
    *(f"model.lora.{field.name}" for field in fields(LoraConfig) if field.name != "enabled"),
    "rollout.lora",
    "checkpoint.hf_adapter",
)
"""Settings with an effect only if adapters are trained."""
VLLM_RANK = 512
"""Largest rank that vLLM serves."""
PEFT = "0.21"
"""Oldest release of peft that was tested."""


def idle_lora(config: Config, given: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield one line per adapter setting that the command line sets to its default, if no adapters are trained.

    `given` has the settings of the command line. `lora_problems` reports adapter settings with other values.
    """
    if config.model.lora.enabled:
        return
    for key, value in given:
        if key in ADAPTER_SETTINGS and value is not None and value == SETTINGS[key].default:
            yield (
                f"{key}={value}: has effect only with model.lora.enabled=true; set model.lora.enabled=true, or remove "
                f"{key}."
            )


def lora_problems(config: Config) -> Iterator[str]:
    lora, backend = config.model.lora, config.backend
    if not lora.enabled:
        yield from without_effect(config, ADAPTER_SETTINGS, "model.lora.enabled=true")
        return
    yield from _modules(lora)
    yield from _reference(config)
    for key in ("contents", "load_contents"):
        contents = getattr(config.checkpoint, key) or []
        if "hf_model" in contents and "model" not in contents:
            yield (
                f"checkpoint.{key}={contents}: with model.lora.enabled=true a run can resume only from model, not from "
                "hf_model; add model."
            )
    yield from _native(config)
    if backend.name == "deepspeed":
        yield from _deepspeed(lora, backend)


def _reference(config: Config) -> Iterator[str]:
    instead = {
        "ref.update_freq": "",
        "ref.fsdp_config.param_offload": ", and use actor.fsdp_config.param_offload",
        "ref.fsdp_config.model_dtype": ", and use model.lora.base_dtype",
    }
    for key, other in instead.items():
        value, default = hydra_value(SETTINGS[key].value(config)), hydra_value(SETTINGS[key].default)
        if value != default:
            yield (
                f"{key}={value}: with model.lora.enabled=true the reference is the actor's frozen model without its "
                f"adapters; set {key}={default}{other}."
            )


def _deepspeed(lora: LoraConfig, backend: BackendConfig) -> Iterator[str]:
    dtype, fitting = base_dtype(lora, backend), compute_dtype(backend)
    if dtype != fitting:
        yield (
            f"model.lora.base_dtype={dtype}: DeepSpeed computes in the dtype of the weights, which must be "
            f"{fitting} with backend.autocast={backend.autocast}; set model.lora.base_dtype=null."
        )
    if lora.use_dora and backend.zero_stage == 3:
        yield (
            "model.lora.use_dora=true: DoRA reads a layer's frozen weight outside the layer's forward pass, and "
            "backend.zero_stage=3 gathers the weight only during that pass; set backend.zero_stage=2, or backend=fsdp2."
        )


def _native(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.lora != "native":
        return
    instead = "set rollout.lora=merged."
    if rollout.name == "embedded":
        yield f"rollout.lora=native: needs rollout=vllm or rollout=vllm_server (rollout=embedded merges); {instead}"
    if config.model.lora.use_dora:
        yield f"rollout.lora=native: vLLM does not support DoRA (model.lora.use_dora=true); {instead}"
    if rollout.tensor_model_parallel_size > 1:
        yield (
            "rollout.lora=native: adapters that are sharded over devices "
            f"(rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}) cannot be verified; {instead}"
        )
    if config.model.lora.rank > VLLM_RANK:
        rank = config.model.lora.rank
        yield f"rollout.lora=native: vLLM serves adapters up to rank {VLLM_RANK} (model.lora.rank={rank}); {instead}"


def suggested_rate(config: Config) -> float | None:
    """Return ten times the schema's learning rate if adapters are trained with the schema's rate, else None."""
    usual = type(config.actor.optim)().lr
    return 10 * usual if config.model.lora.enabled and config.actor.optim.lr == usual else None


def _modules(lora: LoraConfig) -> Iterator[str]:
    targets = lora.target_modules
    if targets == ALL_LINEAR:
        return
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) and name for name in targets):
        instead = f"[{targets}]" if isinstance(targets, str) and targets.isidentifier() else "[q_proj,v_proj]"
        yield (
            f"model.lora.target_modules={targets!r}: set {ALL_LINEAR}, or a list of endings of layer names, such as "
            f"{instead}."
        )


def missing_peft(config: Config) -> Iterator[str]:
    if config.model.lora.enabled and (problem := package_problem("peft", PEFT)):
        yield f"model.lora.enabled=true: {problem}; run `pip install 'peft>={PEFT}'`."
