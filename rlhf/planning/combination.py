"""Finds settings that together make a run fit: few changes, and those with the least effect on training first."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from rlhf.config import Config
from rlhf.planning.memory_plan import Models, Plan, Target, memory_plan
from rlhf.planning.remedies import Effect, candidates, changed_config, is_allowed, override

Change = tuple[str, Any]
"""A setting and its new value."""
EFFECTS: tuple[Effect, ...] = ("speed", "precision")
"""Effects of changes that do not change the training, in the order in which `_from` tries them."""
GIB = 1 << 30
LARGEST_MEMORY = 1 << 42
MOST_RANKS = 1 << 14


@dataclass(frozen=True)
class FittingChanges:
    """Changes of settings, in the order in which they were found, and the plan with all of them."""

    changes: dict[str, Any]
    plan: Plan
    memory: int | None = None
    """If the plan does not fit: bytes of the smallest device on which it would fit, a multiple of 1 GiB; else None."""
    ranks: int | None = None
    """If the plan does not fit: number of the target's devices on which it would fit, found by doubling; else None."""

    @property
    def overrides(self) -> list[str]:
        return [override(setting, value) for setting, value in self.changes.items()]


def combination(config: Config, models: Models, plan: Plan) -> FittingChanges:
    """Return the changes that make the run fit; if none do, the nearest changes and the devices that the run needs.

    Try first without changes to the training, then with each set of changes to the training, the smallest first.
    """
    training = [(row.setting, value) for row, value in candidates(config, plan) if row.effect == "training"]
    nearest: FittingChanges | None = None
    for base in chain.from_iterable(combinations(training, size) for size in range(len(training) + 1)):
        found = _from(config, models, plan.target, base)
        if found is not None and found.plan.fits:
            return found
        if found is not None and (nearest is None or missing(found.plan) < missing(nearest.plan)):
            nearest = found
    assert nearest is not None  # the rules allow the run without changes
    now = changed_config(config, nearest.changes)
    return replace(
        nearest, memory=_smallest_memory(now, models, plan.target), ranks=_fewest_ranks(now, models, plan.target)
    )


def _from(config: Config, models: Models, target: Target, base: Sequence[Change]) -> FittingChanges | None:
    """Return the changes `base` and further changes of only speed or precision; None if the rules forbid `base`.

    Make the first of the `candidates` that brings the plan nearer to fitting, again and again, until none does: first
    only changes of speed, then also of precision. If the run then fits, undo each change that is not needed, the last
    change first.
    """
    steps, now = list(base), changed_config(config, dict(base))
    found = _plan(now, models, target)
    for number in range(len(EFFECTS)):
        while found and missing(found) and (step := _next(now, models, found, EFFECTS[: number + 1])):
            change, found = step
            steps.append(change)
            now = changed_config(config, dict(steps))
    if found is None or missing(found):
        return None if found is None else FittingChanges(dict(steps), found)
    for change in reversed(steps[len(base) :]):
        fewer = [other for other in steps if other is not change]
        other = _plan(changed_config(config, dict(fewer)), models, target)
        if other is not None and not missing(other):
            steps, found = fewer, other
    return FittingChanges(dict(steps), found)


def missing(plan: Plan) -> int:
    """Return how far the plan is from fitting; 0 if the plan fits or the memory is unknown.

    The distance is the sum of the bytes beyond the memory in all phases and on the host, and of the tokens that the
    engine's cache lacks.
    """
    memory, host = plan.target.memory, plan.target.host_memory
    if memory is None:
        return 0
    short = sum(max(0, phase.total - memory) for phase in plan.phases)
    short += 0 if host is None else max(0, sum(plan.host.values()) - host)
    return short + (0 if plan.cached_tokens is None else max(0, plan.sample_tokens - plan.cached_tokens))


def _next(config: Config, models: Models, plan: Plan, effects: tuple[Effect, ...]) -> tuple[Change, Plan] | None:
    """Return the first change with one of `effects` that brings the plan nearer to fitting, and its plan."""
    allowed = [(row, value) for row, value in candidates(config, plan) if row.effect in effects]
    for row, value in sorted(allowed, key=lambda pair: effects.index(pair[0].effect)):
        other = _plan(changed_config(config, {row.setting: value}), models, plan.target)
        if other is not None and missing(other) < missing(plan):
            return (row.setting, value), other
    return None


def _plan(config: Config, models: Models, target: Target) -> Plan | None:
    return memory_plan(config, models, target) if is_allowed(config, target) else None


def _smallest_memory(config: Config, models: Models, target: Target) -> int | None:
    sizes = range(GIB, LARGEST_MEMORY + 1, GIB)

    def fits(memory: int) -> bool:
        return memory_plan(config, models, replace(target, memory=memory)).fits

    number = bisect_left(sizes, True, key=fits)
    return sizes[number] if number < len(sizes) else None


def _fewest_ranks(config: Config, models: Models, target: Target) -> int | None:
    ranks = target.ranks
    while target.cuda and (ranks := 2 * ranks) <= MOST_RANKS:
        other = _plan(config, models, replace(target, ranks=ranks))
        if other is not None and other.fits:
            return ranks
    return None
