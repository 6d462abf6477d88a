"""Computes the utilization of the devices by the updates (MFU)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf.batch import TokenCounts
from rlhf.models.flops import UpdateFlops


@dataclass
class Utilization:
    """Computes the model FLOPs utilization (MFU) of the updates of each role."""

    peak: float | None
    """FLOP/s of all ranks' devices together; None if unknown."""
    _roles: dict[str, tuple[UpdateFlops, int]] = field(default_factory=dict, init=False)

    def add(self, role: str, flops: UpdateFlops | None, epochs: int) -> None:
        """Count the updates of `role` with `epochs` over each batch. `flops` is None if unknown."""
        if flops is not None:
            self._roles[role] = flops, epochs

    def metrics(self, tokens: TokenCounts, timings: Mapping[str, float]) -> dict[str, float]:
        """Return `perf/mfu/ROLE` of a step that trained on `tokens`, from its `timing_s/update_ROLE`."""
        if self.peak is None:
            return {}
        return {
            f"perf/mfu/{role}": epochs * flops.of_tokens(tokens) / (seconds * self.peak)
            for role, (flops, epochs) in self._roles.items()
            if (seconds := timings.get(f"timing_s/update_{role}"))
        }
