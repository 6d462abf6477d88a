"""Compares an engine's weights with the weights sent, by digests, after each weight sync."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Digest = tuple[int, int]  # sum, and sum of squares, of a weight's words, each modulo 2**64
Digests = Mapping[str, Digest]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 22  # elements summed at once; each needs eight bytes beside the weights
_MASK = (1 << 64) - 1
_SHOWN = 8

log = logging.getLogger(__name__)


class WeightsMismatch(RuntimeError):
    """A rollout engine's weights differ from the weights that the trainer sent."""


def digest(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sum and sum of squares, [2] int64 on the tensor's device, of the bits of `tensor` as integers.

    Floating-point tensors count as if cast to `dtype`. A flipped bit always changes the first sum. Neither the order of
    elements nor additional zeros change the digest, and a tensor's digest is the sum of its slices' digests. So weights
    that an engine fuses, pads, repacks or shards keep their digest. Swapped elements are not detected.
    """
    cast = dtype if tensor.is_floating_point() else tensor.dtype
    on_cpu = tensor.device.type == "cpu"
    chunk = _CPU_CHUNK if on_cpu else _GPU_CHUNK
    # Reuse one buffer for all chunks: fresh pages cost as much as the sums.
    room = torch.empty(min(chunk, tensor.numel()), dtype=torch.int64, device=tensor.device)
    sums = []
    for part in tensor.detach().reshape(-1).split(chunk):
        words = room[: part.numel()].copy_(part.to(cast).view(_WORDS[cast.itemsize]))
        # CUDA has no dot product of integers.
        sums += [words.sum(), words.dot(words) if on_cpu else words.square().sum()]
    return torch.stack(sums).view(-1, 2).sum(0)


def read_digests(found: Mapping[str, Tensor]) -> dict[str, Digest]:
    """Return the values of `digest` results by name; waits for the device, the same for all results."""
    if not found:
        return {}
    rows = torch.stack(list(found.values()))
    return {name: (first & _MASK, second & _MASK) for name, (first, second) in zip(found, rows.tolist(), strict=True)}


class WeightCheck:
    """Compares an engine's weights with the weights sent, after each weight sync.

    - A weight is compared with the engine's weight of the same name.
    - A fused weight is compared with the sum of its parts.
    - The other weights of a layer (such as experts) have different names in the engine. The check compares the sum of
      those sent with the sum of those that only the engine has. If the sums differ at the first sync, the engine must
      compute its weights from the weights sent (Mamba's decay rates, for example). The check then logs a warning, and
      from then on only requires that the engine's sum changes exactly when the sum of the weights sent changes.
    - Weights without a counterpart are not compared.

    An engine that has none of the weights sent, or that lacks a weight of an earlier sync, fails the check.

    Args:
        fused: the engine's module names, each with the names of its parts in the weights sent.
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
        self._fused = {part: whole for whole, parts in (fused or {}).items() for part in parts}
        self._renamed, self._exact = renamed, exact
        self._computed: set[str] = set()
        self._before: tuple[Digests, Sequence[Digests]] | None = None
        self._names: set[str] = set()

    def check(self, sent: Digests, ranks: Sequence[Digests], version: str) -> None:
        """Compare `sent` with `ranks`, the digests of each engine device by the engine's names. Raises WeightsMismatch
        with the weights that differ, and whether each still has its old value."""
        actual_names: set[str] = set().union(*ranks)
        groups = {name: self._group(name, actual_names) for name in sent}
        expected = _added((groups[name], found) for name, found in sent.items())
        compared = set(groups.values())
        actual = [
            _added((name if name in compared else self._rest(name), found) for name, found in rank.items())
            for rank in ranks
        ]
        there = [group for group in expected if any(group in rank for rank in actual)]
        if expected and not there:
            raise WeightsMismatch(f"The rollout engine reports none of the weights that the trainer sent ({version}).")
        if lost := sorted(self._names - actual_names):
            raise WeightsMismatch(f"The rollout engine no longer reports some weights ({version}): {_listed(lost)}.")
        wrong = [group for group in there if not self._agrees(group, expected, actual)]
        if self._before is None and (computed := [group for group in wrong if group not in actual_names]):
            self._computed |= set(computed)
            log.warning(
                "The rollout engine computes some weights from the weights sent, so only changes are checked: %s.",
                _listed(computed),
            )
            wrong = [group for group in wrong if group in actual_names]
        if wrong:
            raise WeightsMismatch(self._error_text(wrong, expected, actual, version))
        self._before, self._names = (expected, actual), actual_names

    def _group(self, name: str, actual_names: set[str]) -> str:
        if not self._exact:
            return self._rest(name)
        name = self._renamed(name)
        if name in actual_names:
            return name
        whole = ".".join(self._fused.get(part, part) for part in name.split("."))
        return whole if whole in actual_names else self._rest(name)

    def _rest(self, name: str) -> str:
        if not self._exact:
            return "all quantized weights"
        layer = re.search(r"\.(\d+)\.", name)
        return f"other weights of layer {layer[1]}" if layer else "other weights"

    def _agrees(self, group: str, expected: Digests, actual: Sequence[Digests]) -> bool:
        if group in self._computed:
            return self._changed(group, expected, actual) in ((False, False), (True, True))
        parts = [rank[group] for rank in actual if group in rank]
        # Each device has all of the weight, or a slice.
        return all(part == expected[group] for part in parts) or _added((group, part) for part in parts) == {
            group: expected[group]
        }

    def _changed(self, group: str, expected: Digests, actual: Sequence[Digests]) -> tuple[bool, bool]:
        """Return whether the weights sent changed since the last check, and whether the engine's did."""
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


def _added(digests: Iterable[tuple[str, Digest]]) -> dict[str, Digest]:
    sums: dict[str, Digest] = {}
    for name, (first, second) in digests:
        before = sums.get(name, (0, 0))
        sums[name] = (before[0] + first) & _MASK, (before[1] + second) & _MASK
    return sums


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} ({', '.join(names[:_SHOWN])}{more})"
