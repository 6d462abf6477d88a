"""Formats a plan as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.config import RolloutConfig
from rlhf.models.parameter_count import short_number
from rlhf.planning.byte_sizes import gib
from rlhf.planning.memory_plan import Models, Plan
from rlhf.planning.remedies import Remedy

TIGHT = 0.9
"""Fraction of the memory above which the allocator's fragmentation may use the rest."""


def line(plan: Plan) -> str:
    """Return the plan in one line, for the banner."""
    of = "" if plan.target.memory is None else f" of {gib(plan.target.memory)}"
    return f"at most {gib(plan.peak.total)}{of} on each rank, in the {plan.peak.name} phase (python -m rlhf.plan)"


def page(rollout: RolloutConfig, models: Models, plan: Plan, found: Sequence[Remedy], disk_speed: int) -> str:
    """Return tables of all phases, host, disk and tokens, then the verdict and the remedies."""
    parts = [
        "\n".join(_head(rollout, models, plan)),
        "\n".join(_phases(plan)),
        "\n".join(_peak(plan)),
        "\n".join(_elsewhere(plan, disk_speed)),
        "\n".join(_verdict(rollout, plan, found)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(rollout: RolloutConfig, models: Models, plan: Plan) -> Iterator[str]:
    roles = [("policy", models.policy), ("critic", models.critic), ("reward model", models.reward_model)]
    named = ", ".join(f"{role} {short_number(model.count)}" for role, model in roles if model is not None)
    memory = "unknown memory" if plan.target.memory is None else gib(plan.target.memory)
    kind = "GPU" if plan.target.cuda else "CPU"
    ranks = "1 rank" if plan.target.ranks == 1 else f"{plan.target.ranks:,} ranks"
    yield f"{named}; {ranks}, each with {memory} ({kind}); {plan.backend}, rollout {rollout.name}"
    cached = "" if plan.cached_tokens is None else f"; the engine's cache holds {plan.cached_tokens:,} tokens"
    yield (
        f"{plan.tokens_per_step:,} tokens in a step at most, {plan.tokens_per_micro_batch:,} in a micro-batch of a rank"
        f"{cached}"
    )


def _phases(plan: Plan) -> Iterator[str]:
    yield "each rank's device, by phase"
    for phase in plan.phases:
        mark = "  <- peak" if phase is plan.peak else ""
        yield f"  {phase.name:<16}{gib(phase.total):>12}{mark}"


def _peak(plan: Plan) -> Iterator[str]:
    yield f"{plan.peak.name}, by use"
    yield from _table(plan.peak.items)


def _table(items: Mapping[str, int]) -> Iterator[str]:
    for name, size in sorted(items.items(), key=lambda item: -item[1]):
        if size:
            yield f"  {name:<32}{gib(size):>12}"


def _elsewhere(plan: Plan, disk_speed: int) -> Iterator[str]:
    if plan.host:
        yield f"each rank's host: {gib(sum(plan.host.values()))}"
        yield from _table(plan.host)
    size = plan.checkpoint.total
    if not size:
        return
    yield f"each save on disk: {gib(size)}"
    yield from _table(plan.checkpoint.by_part)
    kept = plan.checkpoint.max_to_keep
    room = "" if kept is None else f"; {gib(size * (kept + 1))} while {kept} are kept and one is written"
    speed = f"{disk_speed / 1e9:g} GB/s"
    yield f"  written in {size / disk_speed:,.0f} s at {speed}, the least time between two saves{room}"


def too_small_a_cache(rollout: RolloutConfig, plan: Plan) -> str:
    """Return a sentence about an engine that cannot start because its cache is too small, with remedies."""
    share, gpus = rollout.gpu_memory_utilization, rollout.tensor_model_parallel_size
    return (
        f"rollout.gpu_memory_utilization={share} leaves the engine a cache of {plan.cached_tokens:,} tokens beside its "
        f"weights, and a sample may have {plan.sample_tokens:,}: a larger share gives it more, and so do more GPUs to "
        f"an engine (rollout.tensor_model_parallel_size={2 * gpus})."
    )


def _verdict(rollout: RolloutConfig, plan: Plan, found: Sequence[Remedy]) -> Iterator[str]:
    memory, peak = plan.target.memory, plan.peak.total
    if memory is None:
        yield "The memory of a device is not known here: --device-memory 80GB says it."
    elif not plan.fits:
        if peak > memory:
            yield f"It does not fit: {plan.peak.name} takes {gib(peak - memory)} more than there is."
        if not plan.engine_starts:
            yield f"The engine would not start: {too_small_a_cache(rollout, plan)}"
    elif peak > TIGHT * memory:
        yield f"It fits with {gib(memory - peak)} to spare, of which the gaps between tensors take some."
    else:
        yield f"It fits with {gib(memory - peak)} to spare."
    if found:
        yield "What lowers the peak:"
        for remedy in found:
            enough = "" if plan.fits else ", and fits" if remedy.fits else ""
            yield f"  {remedy!s:<48}{gib(remedy.saved):>12} less{enough}"


def document(models: Models, plan: Plan, found: Sequence[Remedy], disk_speed: int) -> dict[str, Any]:
    """Return the plan as a JSON document, with sizes in bytes."""
    target, size = plan.target, plan.checkpoint
    roles = {"policy": models.policy, "critic": models.critic, "reward_model": models.reward_model}
    return {
        "parameters": {role: model.count for role, model in roles.items() if model is not None},
        "device": "cuda" if target.cuda else "cpu",
        "ranks": target.ranks,
        "device_memory": target.memory,
        "fits": None if target.memory is None else plan.fits,
        "peak": {"phase": plan.peak.name, "bytes": plan.peak.total},
        "phases": {phase.name: dict(phase.items) for phase in plan.phases},
        "host": dict(plan.host),
        "checkpoint": {"bytes": size.total, "parts": dict(size.by_part), "seconds": size.total / disk_speed},
        "tokens": {
            "step": plan.tokens_per_step,
            "micro_batch": plan.tokens_per_micro_batch,
            "cache": plan.cached_tokens,
        },
        "remedies": [{"set": str(remedy), "saves": remedy.saved, "fits": remedy.fits} for remedy in found],
    }
