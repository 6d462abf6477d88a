"""Compares an engine's weights with the weights sent, by digests, after each weight sync."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

Digest = tuple[int, int, int | None, int]
"""Sum, sum of squares, and place sum of a weight's words, each modulo 2**64, and the number of words. A word is an
element's bits as an integer. The place sum is the sum of word i times _BASE**(i + 1), or None if the order of the words
is not known."""
Digests = Mapping[str, Digest]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 21  # elements summed at once; each needs up to 32 bytes of memory
_MASK = (1 << 64) - 1
# An odd number that is 3 modulo 8. So its powers for two places differ in a low bit, and a swap changes the place sum.
_BASE = 0x9E3779B97F4A7C13
_SHOWN = 8

log = logging.getLogger(__name__)


class WeightsMismatch(RuntimeError):
    """A rollout engine's weights differ from the weights that the trainer sent."""


def digest(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the digest of the bits of `tensor`, [4] int64 on the tensor's device. Does not wait for the device.

    Floating-point tensors count as if cast to `dtype`. A flipped bit always changes the sum. A swap of two unequal
    words changes the place sum. The sum and the sum of squares ignore the order of elements and additional zeros, and
    add up over the slices of a tensor. So padding, repacking and sharding in an engine change neither of the two.
    """
    cast = dtype if tensor.is_floating_point() else tensor.dtype
    on_cpu = tensor.device.type == "cpu"
    chunk = _CPU_CHUNK if on_cpu else _GPU_CHUNK
    flat = tensor.detach().reshape(-1)
    # Reuse two buffers for all chunks: fresh pages cost as much as the sums.
    room = torch.empty(min(chunk, len(flat)), dtype=torch.int64, device=tensor.device)
    powers = _powers_on_cpu(chunk)[: len(room)] if on_cpu else torch.full_like(room, _signed(_BASE)).cumprod(0)
    sums = []
    for number, part in enumerate(flat.split(chunk)):
        words, of_places = room[: len(part)].copy_(part.to(cast).view(_WORDS[cast.itemsize])), powers[: len(part)]
        # CUDA has no dot product of integers.
        square = words.dot(words) if on_cpu else words.square().sum()
        place = words.dot(of_places) if on_cpu else (words * of_places).sum()
        sums += [words.sum(), square, place * _signed(pow(_BASE, number * chunk, 1 << 64))]
    return torch.cat([torch.stack(sums).view(-1, 3).sum(0), room.new_full((1,), len(flat))])


@cache
def _powers_on_cpu(count: int) -> Tensor:
    return torch.full((count,), _signed(_BASE), device="cpu").cumprod(0)


def _signed(word: int) -> int:
    """Return the int64 with the bits of the unsigned `word`."""
    return word - (1 << 64) if word >> 63 else word


def read_digests(found: Mapping[str, Tensor]) -> dict[str, Digest]:
    """Return the values of `digest` results by name; waits for the device once for all of them."""
    if not found:
        return {}
    rows = torch.stack(list(found.values())).tolist()
    return {
        name: (first & _MASK, second & _MASK, place & _MASK, count)
        for name, (first, second, place, count) in zip(found, rows, strict=True)
    }


def joined(parts: Iterable[Digest]) -> Digest:
    """Return the digest of weights that are concatenated in this order."""
    first, second, count = 0, 0, 0
    place: int | None = 0
    for part in parts:
        first, second = (first + part[0]) & _MASK, (second + part[1]) & _MASK
        if place is not None:
            place = None if part[2] is None else (place + pow(_BASE, count, 1 << 64) * part[2]) & _MASK
        count += part[3]
    return first, second, place, count


def in_any_order(found: Digest) -> Digest:
    first, second, _, count = found
    return first, second, None, count


class WeightCheck:
    """Compares an engine's weights with the weights sent, after each weight sync.

    - A weight is compared with the engine's weight of the same name.
    - A fused weight is compared with the concatenation of its parts.
    - The other weights of a layer (such as experts) have different names in the engine, so the check compares two sums
      per layer: over the sent weights without a counterpart of their name, and over the engine's weights without one.
      If the sums differ at the first sync, the check assumes that the engine computes its weights from the sent ones
      (Mamba's decay rates, for example). The check then logs a warning, and from then on only requires that the
      engine's sum changes exactly when the sum of the sent weights changes.
    - The places of elements are compared if one device has the whole weight. A weight whose elements have other places
      at the first sync (a transposed weight, for example) is from then on compared without places.
    - If only the trainer or only the engine has weights of a layer without a counterpart, the check ignores these
      weights.

    An engine that has none of the weights sent, or that lacks a weight of an earlier sync, fails the check.

    Args:
        fused: the engine's module names, each with the names of its parts in the weights sent, in their order.
        renamed: returns the engine's name of a weight sent.
        exact: False for a quantized engine. The check then sums all weights and compares only whether the sum changed.
    """

    def __init__(
        self,
        fused: Mapping[str, Sequence[str]] | None = None,
        renamed: Callable[[str], str] = str,
        *,
        exact: bool = True,
    ) -> None:
        self._fused = {part: (whole, i) for whole, parts in (fused or {}).items() for i, part in enumerate(parts)}
        self._renamed, self._exact = renamed, exact
        self._computed: set[str] = set()
        self._rearranged: set[str] = set()
        self._before: tuple[Digests, Sequence[Digests]] | None = None
        self._names: set[str] = set()

    def names(self, sent: Iterable[str]) -> set[str]:
        """Return the engine's names of weights sent."""
        return set(map(self._renamed, sent))

    def check(self, sent: Digests, ranks: Sequence[Digests], version: str) -> None:
        """Compare `sent` with `ranks`, the digests of each engine device by the engine's names.

        Raises WeightsMismatch with the weights that differ, and whether each still has its old value.
        """
        actual_names: set[str] = set().union(*ranks)
        groups = {name: self._group(name, actual_names) for name in sent}
        # Sort the parts of a fused weight by their order in the weight, which may not be the order of sending.
        in_order = sorted(sent, key=lambda name: groups[name][1])
        expected = _joined_by_group((groups[name][0], sent[name]) for name in in_order)
        actual = [
            _joined_by_group((name if name in expected else self._rest(name), found) for name, found in rank.items())
            for rank in ranks
        ]
        there = [group for group in expected if any(group in rank for rank in actual)]
        if expected and not there:
            raise WeightsMismatch(f"The rollout engine reports none of the weights that the trainer sent ({version}).")
        if lost := sorted(self._names - actual_names):
            raise WeightsMismatch(f"The rollout engine no longer reports some weights ({version}): {_listed(lost)}.")
        if self._before is None:
            self._learn(there, expected, actual, actual_names)
        wrong = [group for group in there if not self._agrees(group, expected, actual)]
        if wrong:
            raise WeightsMismatch(self._error_text(wrong, expected, actual, version))
        self._before, self._names = (expected, actual), actual_names

    def _learn(
        self, groups: Sequence[str], expected: Digests, actual: Sequence[Digests], actual_names: set[str]
    ) -> None:
        """Find, at the first sync, which weights the engine rearranges or computes."""
        self._computed, self._rearranged = set(), set()
        wrong = [group for group in groups if not self._agrees(group, expected, actual)]
        self._rearranged = set(wrong)
        still_wrong = {group for group in wrong if not self._agrees(group, expected, actual)}
        self._computed = still_wrong - actual_names
        if moved := [group for group in wrong if group in actual_names - still_wrong]:
            log.info(
                "The rollout engine rearranges the elements of some weights, so their order is not checked: %s.",
                _listed(moved),
            )
        if self._computed:
            log.warning(
                "The rollout engine computes some weights from the weights sent, so only changes are checked: %s.",
                _listed(sorted(self._computed)),
            )

    def _group(self, name: str, actual_names: set[str]) -> tuple[str, int]:
        """Return the group in which a weight sent is compared, and its index among the parts of a fused weight."""
        if not self._exact:
            return self._rest(name), 0
        name = self._renamed(name)
        if name in actual_names:
            return name, 0
        parts = [self._fused.get(part, (part, 0)) for part in name.split(".")]
        whole = ".".join(part for part, _ in parts)
        return (whole, max(index for _, index in parts)) if whole in actual_names else (self._rest(name), 0)

    def _rest(self, name: str) -> str:
        if not self._exact:
            return "all quantized weights"
        layer = re.search(r"\.(\d+)\.", name)
        return f"other weights of layer {layer[1]}" if layer else "other weights"

    def _agrees(self, group: str, expected: Digests, actual: Sequence[Digests]) -> bool:
        if group in self._computed:
            return self._before is None or self._changed(group, expected, actual) in ((False, False), (True, True))
        parts = [rank[group] for rank in actual if group in rank]
        sent, places = expected[group], group not in self._rearranged
        # Either each device has the whole weight, or the devices have slices, which are joined.
        if all(part[:2] == sent[:2] for part in parts):
            return not places or all(part[2] in (None, sent[2]) for part in parts)
        return len(parts) > 1 and joined(parts)[:2] == sent[:2]

    def _changed(self, group: str, expected: Digests, actual: Sequence[Digests]) -> tuple[bool, bool]:
        """Return whether the sent weights changed since the last check, and whether the engine's weights changed."""
        assert self._before is not None
        sent_before, actual_before = self._before
        return expected[group] != sent_before.get(group), [rank.get(group) for rank in actual] != [
            rank.get(group) for rank in actual_before
        ]

    def _error_text(self, wrong: Sequence[str], expected: Digests, actual: Sequence[Digests], version: str) -> str:
        kept = [group for group in wrong if self._before and self._changed(group, expected, actual) == (True, False)]
        other = [group for group in wrong if group not in kept]
        lines = [f"The rollout engine does not have the weights that the trainer sent ({version})."]
        if kept:
            lines.append(f"Changed in training, but the engine still has the old values: {_listed(kept)}.")
        if other:
            lines.append(f"Neither the old values nor the values sent: {_listed(other)}.")
        return " ".join(lines)


def _joined_by_group(digests: Iterable[tuple[str, Digest]]) -> dict[str, Digest]:
    groups: dict[str, list[Digest]] = {}
    for group, found in digests:
        groups.setdefault(group, []).append(found)
    return {group: joined(found) for group, found in groups.items()}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} ({', '.join(names[:_SHOWN])}{more})"
