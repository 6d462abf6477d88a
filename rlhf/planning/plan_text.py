"""Formats a plan as text and as JSON."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlhf.config import RolloutConfig
from rlhf.models.parameter_count import short_number
from rlhf.planning.combination import FittingChanges
from rlhf.planning.memory_plan import Models, Plan
from rlhf.planning.remedies import Remedy

HOST_REMEDIES = {
    "Python and torch": "a smaller trainer.nproc",
    "copy for saves": "checkpoint.async_save=false",
    "snapshots in memory": "checkpoint.memory.freq=0",
    "offloaded": "param_offload=false or optimizer_offload=false",
    "sleeping engine's weights": "rollout.sleep_level=2",
    "rollouts": "a smaller data.train_batch_size",
}
"""The setting that lowers each part of the host's memory."""
TIGHT = 0.9
"""Fraction of the memory above which the plan warns of the allocator's fragmentation."""


COLUMNS = 120
"""Longest line of a command."""


def gib(size: int) -> str:
    """Return a size in GiB, small sizes in MiB: 79.2 GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def plan_line(plan: Plan) -> str:
    """Return the plan in one line, for the banner."""
    of = "" if plan.target.memory is None else f" of {gib(plan.target.memory)}"
    return f"at most {gib(plan.peak.total)}{of} on each rank, in the {plan.peak.name} phase (python -m rlhf.plan)"


def plan_page(
    rollout: RolloutConfig,
    models: Models,
    plan: Plan,
    remedies: Sequence[Remedy],
    disk_speed: int,
    together: FittingChanges | None = None,
    typed: Sequence[str] = (),
) -> str:
    """Return tables of all phases, host, disk and tokens, then whether the run fits, and what makes it fit.

    Args:
        together: the combined changes for a run that does not fit.
        typed: the overrides of the command line.
    """
    parts = (
        _head(rollout, models, plan),
        _phases(plan),
        _peak(plan),
        _host_and_disk(plan, disk_speed),
        _verdict(rollout, plan, remedies),
        () if together is None else _together(together, typed),
    )
    return "\n\n".join(filter(None, map("\n".join, parts))) + "\n"


def _head(rollout: RolloutConfig, models: Models, plan: Plan) -> Iterator[str]:
    roles = [("policy", models.policy), ("critic", models.critic), ("reward model", models.reward_model)]
    named = ", ".join(f"{role} {short_number(model.count)}" for role, model in roles if model is not None)
    memory = "unknown memory" if plan.target.memory is None else gib(plan.target.memory)
    kind = "GPU" if plan.target.cuda else "CPU"
    ranks = "1 rank" if plan.target.ranks == 1 else f"{plan.target.ranks:,} ranks"
    engine = plan.backend + (f", {plan.replicas:,} replicas" if plan.replicas > 1 else "")
    yield f"{named}; {ranks}, each with {memory} ({kind}); {engine}, rollout {rollout.name}"
    cached = "" if plan.cached_tokens is None else f"; KV cache of the engine: {plan.cached_tokens:,} tokens"
    if plan.engine_share is not None:
        cached += f" (gpu_memory_utilization {plan.engine_share:.2g})"
    yield (
        f"at most {plan.tokens_per_step:,} tokens per step, {plan.tokens_per_micro_batch:,} per micro-batch of a rank"
        f"{cached}"
    )


def _phases(plan: Plan) -> Iterator[str]:
    yield "device memory of each rank, by phase"
    for phase in plan.phases:
        mark = "  <- peak" if phase is plan.peak else ""
        yield f"  {phase.name:<16}{gib(phase.total):>12}{mark}"


def _peak(plan: Plan) -> Iterator[str]:
    yield f"peak ({plan.peak.name}), by use"
    yield from _table(plan.peak.items)


def _table(items: Mapping[str, int]) -> Iterator[str]:
    for name, size in sorted(items.items(), key=lambda item: -item[1]):
        if size:
            yield f"  {name:<32}{gib(size):>12}"


def _host_and_disk(plan: Plan, disk_speed: int) -> Iterator[str]:
    if plan.host:
        yield f"host memory of each rank: {gib(sum(plan.host.values()))}"
        yield from _table(plan.host)
    size = plan.checkpoint.total
    if not size:
        return
    yield f"each checkpoint on disk: {gib(size)}"
    yield from _table(plan.checkpoint.by_part)
    kept = plan.checkpoint.max_to_keep
    speed = f"{disk_speed / 1e9:g} GB/s"
    yield f"  writing takes {size / disk_speed:,.0f} s at {speed}: leave at least that long between two saves"
    if kept is not None:
        yield f"  disk space needed: {gib(size * (kept + 1))}, for {kept} kept checkpoints and the next one"


def cache_problem(rollout: RolloutConfig, plan: Plan) -> str:
    """Return a sentence about an engine that cannot start because its cache is too small, with remedies."""
    share, gpus = plan.engine_share, rollout.tensor_model_parallel_size
    given = rollout.gpu_memory_utilization is not None
    return (
        f"{f'rollout.gpu_memory_utilization={share}' if given else f'training leaves {share:.2g} of the GPU, which'} "
        f"leaves a KV cache of {plan.cached_tokens:,} tokens beside the engine's weights, but a sample may have "
        f"{plan.sample_tokens:,} tokens. {'Raise rollout.gpu_memory_utilization, or set' if given else 'Set'} "
        f"rollout.tensor_model_parallel_size={2 * gpus}."
    )


def host_problem(plan: Plan) -> str:
    """Return a sentence about host memory that is too small, with remedies."""
    assert plan.target.host_memory is not None
    largest, size = max(plan.host.items(), key=lambda item: item[1])
    return (
        f"each rank needs {gib(sum(plan.host.values()))} of host memory, and the machine has "
        f"{gib(plan.target.host_memory)} for each (largest part: {largest} {gib(size)}). Set {HOST_REMEDIES[largest]}."
    )


def _verdict(rollout: RolloutConfig, plan: Plan, remedies: Sequence[Remedy]) -> Iterator[str]:
    memory, peak = plan.target.memory, plan.peak.total
    if memory is None:
        yield "The memory of this machine's devices is unknown. Set --device-memory, for example to 80GB."
    elif not plan.fits:
        if peak > memory:
            yield f"The run does not fit: {plan.peak.name} needs {gib(peak - memory)} more than a rank has."
        if not plan.fits_host:
            yield f"The run does not fit: {host_problem(plan)}"
        if not plan.engine_starts:
            yield f"The engine would not start: {cache_problem(rollout, plan)}"
    elif peak > TIGHT * memory:
        yield f"The run fits with {gib(memory - peak)} to spare, but memory fragmentation may need more than that."
    else:
        fills = ""
        if any(each.fills for each in plan.phases):
            fills = " During generation, vLLM's cache takes the memory that other uses leave."
        yield f"The run fits with {gib(memory - peak)} to spare.{fills}"
    if remedies:
        yield "Settings that lower the peak:"
        for remedy in remedies:
            enough = "" if plan.fits else ", and the run fits" if remedy.fits else ""
            yield f"  {remedy!s:<48}{gib(remedy.saved):>12} less{enough}"


def _together(found: FittingChanges, typed: Sequence[str]) -> Iterator[str]:
    if found.plan.fits:
        keys = {text.partition("=")[0] for text in found.overrides}
        kept = [text for text in typed if text.partition("=")[0] not in keys]
        yield f"With these settings together the run fits (the peak: {plan_peak(found.plan)}):"
        yield from _shell_lines(["python", "-m", "rlhf.train", *kept, *found.overrides])
        return
    yield nothing_fits(found)
    yield f"  {devices_needed(found)}"


def _shell_lines(words: Iterable[str]) -> Iterator[str]:
    """Yield one shell command, in lines of at most `COLUMNS` columns if no word is longer."""
    line = " "
    for word in map(shlex.quote, words):
        if len(f"{line} {word} \\") > COLUMNS:
            yield f"{line} \\"
            line = "   "
        line += f" {word}"
    yield line


def nothing_fits(found: FittingChanges) -> str:
    """Return a sentence about a run that no settings make fit, with the settings that come nearest."""
    changes = f"with {' '.join(found.overrides)}" if found.changes else "whatever the settings"
    return f"No settings make the run fit: {changes}, {plan_peak(found.plan)}."


def plan_peak(plan: Plan) -> str:
    memory = plan.target.memory or 0
    return f"{plan.peak.name} needs {gib(plan.peak.total)} of {gib(memory)}"


def devices_needed(found: FittingChanges) -> str:
    """Return a sentence with the devices, by memory or number, on which the run fits, or else with another remedy."""
    kind = "GPU" if found.plan.target.cuda else "rank"
    ways = [] if found.memory is None else [f"at least {gib(found.memory)} for each {kind}"]
    ways += [] if found.ranks is None else [f"{found.ranks:,} {kind}s"]
    if not ways:
        if found.plan.fits_host:
            return "The run needs a smaller model."
        problem = host_problem(found.plan)
        return problem[0].upper() + problem[1:]
    return f"With these settings the run needs {', or '.join(ways)}."


def plan_document(
    models: Models, plan: Plan, remedies: Sequence[Remedy], disk_speed: int, together: FittingChanges | None = None
) -> dict[str, Any]:
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
        "together": None
        if together is None
        else {
            "set": together.overrides,
            "fits": together.plan.fits,
            "peak": {"phase": together.plan.peak.name, "bytes": together.plan.peak.total},
            "device_memory": together.memory,
            "ranks": together.ranks,
        },
        "remedies": [{"set": str(remedy), "saves": remedy.saved, "fits": remedy.fits} for remedy in remedies],
    }
