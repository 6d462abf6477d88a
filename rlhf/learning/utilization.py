"""Computes the utilization of the devices by the updates (MFU)."""

from collections.abc import Mapping

from rlhf.batch import TokenCounts
from rlhf.models.flops import UpdateFlops


class Utilization:
    """Computes the model FLOPs utilization (MFU) of the updates of each role.

    `peak` is the FLOP/s of all ranks' devices together; None if unknown.
    """

    def __init__(self, peak: float | None) -> None:
        self._peak = peak
        self._roles: dict[str, tuple[UpdateFlops, int]] = {}

    def add(self, role: str, flops: UpdateFlops | None, epochs: int) -> None:
        """Count the updates of `role` with `epochs` over each batch. `flops` is None if unknown."""
        if flops is not None:
            self._roles[role] = flops, epochs

    def metrics(self, tokens: TokenCounts, timings: Mapping[str, float]) -> dict[str, float]:
        """Return `perf/mfu/ROLE` of a step that trained on `tokens`, from its `timing_s/update_ROLE`."""
        if self._peak is None:
            return {}
        return {
            f"perf/mfu/{role}": epochs * flops.of_tokens(tokens) / (seconds * self._peak)
            for role, (flops, epochs) in self._roles.items()
            if (seconds := timings.get(f"timing_s/update_{role}"))
        }
