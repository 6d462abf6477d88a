"""Digests of weights: what an engine holds after a hand-over is compared with what it was sent."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Digest = tuple[int, int]
"""Sum, and sum of squares, of the words of a weight, each modulo 2**64."""
Digests = Mapping[str, Digest]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 22
"""Elements that are summed at once: eight bytes each, beside the weights."""
_MASK = (1 << 64) - 1
_SHOWN = 8

log = logging.getLogger(__name__)


class WeightsNotHeld(RuntimeError):
    """A rollout engine does not hold what it was sent."""


def digest(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum and sum of squares, [2] in int64 on its device, of the bits of `tensor` as integers, element by element.

    Floating-point tensors are taken as if cast to `dtype`. A flipped bit always changes the first sum. The digest says
    nothing of the order of elements and adds up over parts, and zeros count for nothing: so weights that an engine
    fuses, pads, repacks or shares out between devices have the digest of what they were made of. What it cannot see are
    elements that have changed places.
    """
    cast = dtype if tensor.is_floating_point() else tensor.dtype
    on_cpu = tensor.device.type == "cpu"
    chunk = _CPU_CHUNK if on_cpu else _GPU_CHUNK
    # One piece of memory for all chunks: fresh pages cost as much as the sums.
    room = torch.empty(min(chunk, tensor.numel()), dtype=torch.int64, device=tensor.device)
    sums = []
    for part in tensor.detach().reshape(-1).split(chunk):
        words = room[: part.numel()].copy_(part.to(cast).view(_WORDS[cast.itemsize]))
        # CUDA has no dot product of integers.
        sums += [words.sum(), words.dot(words) if on_cpu else words.square().sum()]
    return torch.stack(sums).view(-1, 2).sum(0)


def read_digests(found: Mapping[str, Tensor]) -> dict[str, Digest]:
    """The values of what `digest` gave for each name; waits for their device, the same for all."""
    if not found:
        return {}
    rows = torch.stack(list(found.values()))
    return {name: (first & _MASK, second & _MASK) for name, (first, second) in zip(found, rows.tolist(), strict=True)}


class WeightCheck:
    """Compares what an engine holds with what it was sent, after each hand-over.

    Weights are compared by name. Those that the engine fuses are compared with the sum of their parts; those that it
    names otherwise altogether (experts), with all such weights of their layer. Weights of the latter kind that do not
    agree at the very first hand-over pass for computed from what is sent (as Mamba's decay rates are), with a warning:
    they only have to change when what is sent changes, and not otherwise. What has no counterpart is not compared; an
    engine that has none of anything, or that has had one and has it no more, does not hold what it was sent.

    Args:
        fused: names of modules in the engine, each with those of its parts in what is sent.
        renamed: the engine's name of a weight that is sent.
        exact: whether the engine holds weights as they are sent; quantized ones as a whole only have to change.
    """

    def __init__(
        self,
        fused: Mapping[str, Sequence[str]] | None = None,
        renamed: Callable[[str], str] = str,
        *,
        exact: bool = True,
    ) -> None:
        self._fused = {part: whole for whole, parts in (fused or {}).items() for part in parts}
        self._renamed, self._exact = renamed, exact
        self._computed: set[str] = set()
        self._before: tuple[Digests, Sequence[Digests]] | None = None
        self._names: set[str] = set()

    def check(self, sent: Digests, ranks: Sequence[Digests], version: str) -> None:
        """`ranks`: what each of the engine's devices holds, by the engine's names. `version` names what was sent.

        Raises:
            WeightsNotHeld: naming the weights, and of each whether it is still what it was before.
        """
        held_names: set[str] = set().union(*ranks)
        groups = {name: self._group(name, held_names) for name in sent}
        expected = _added((groups[name], found) for name, found in sent.items())
        compared = set(groups.values())
        held = [
            _added((name if name in compared else self._rest(name), found) for name, found in rank.items())
            for rank in ranks
        ]
        there = [group for group in expected if any(group in rank for rank in held)]
        if expected and not there:
            raise WeightsNotHeld(f"The rollout engine reports none of the weights that it was sent ({version}).")
        if lost := sorted(self._names - held_names):
            raise WeightsNotHeld(f"The rollout engine reports some weights no more ({version}): {_listed(lost)}.")
        wrong = [group for group in there if not self._agrees(group, expected, held)]
        if self._before is None and (computed := [group for group in wrong if group not in held_names]):
            self._computed |= set(computed)
            log.warning(
                "The engine does not hold as they are sent, so only changes are checked: %s.", _listed(computed)
            )
            wrong = [group for group in wrong if group in held_names]
        if wrong:
            raise WeightsNotHeld(self._told(wrong, expected, held, version))
        self._before, self._names = (expected, held), held_names

    def _group(self, name: str, held_names: set[str]) -> str:
        if not self._exact:
            return self._rest(name)
        name = self._renamed(name)
        if name in held_names:
            return name
        whole = ".".join(self._fused.get(part, part) for part in name.split("."))
        return whole if whole in held_names else self._rest(name)

    def _rest(self, name: str) -> str:
        if not self._exact:
            return "all quantized weights"
        layer = re.search(r"\.(\d+)\.", name)
        return f"others of layer {layer[1]}" if layer else "others"

    def _agrees(self, group: str, expected: Digests, held: Sequence[Digests]) -> bool:
        if group in self._computed:
            return self._changed(group, expected, held) in ((False, False), (True, True))
        parts = [rank[group] for rank in held if group in rank]
        # Each device has all of it, or its part.
        return all(part == expected[group] for part in parts) or _added((group, part) for part in parts) == {
            group: expected[group]
        }

    def _changed(self, group: str, expected: Digests, held: Sequence[Digests]) -> tuple[bool, bool]:
        """Whether what was sent is something else than last time, and whether what is held is."""
        assert self._before is not None
        sent_before, held_before = self._before
        return expected[group] != sent_before.get(group), [rank.get(group) for rank in held] != [
            rank.get(group) for rank in held_before
        ]

    def _told(self, wrong: Sequence[str], expected: Digests, held: Sequence[Digests], version: str) -> str:
        kept = [group for group in wrong if self._before and self._changed(group, expected, held) == (True, False)]
        other = [group for group in wrong if group not in kept]
        lines = [f"The rollout engine does not hold the weights that it was sent ({version})."]
        if kept:
            lines.append(f"Changed in training, but still the old ones in the engine: {_listed(kept)}.")
        if other:
            lines.append(f"Neither the old ones nor those that were sent: {_listed(other)}.")
        return " ".join(lines)


def _added(digests: Iterable[tuple[str, Digest]]) -> dict[str, Digest]:
    """The sums of those with the same name."""
    sums: dict[str, Digest] = {}
    for name, (first, second) in digests:
        before = sums.get(name, (0, 0))
        sums[name] = (before[0] + first) & _MASK, (before[1] + second) & _MASK
    return sums


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} ({', '.join(names[:_SHOWN])}{more})"
