"""Memory of one model of a run: what stays on a rank's device, and what its passes take there."""

from dataclasses import dataclass

from rlhf.planning.activations import PassCost, chunk_bytes
from rlhf.planning.adapter_state import Adapted
from rlhf.planning.model_shapes import ModelShapes
from rlhf.planning.pass_sizes import PassSize
from rlhf.planning.training_state import TrainingState

LOADING = "loading"
PHASES = {
    "actor": ("old log-probs", "actor update"),
    "critic": ("values", "critic update"),
    "reference": ("reference",),
    "reward model": ("rewards",),
}
"""Phases with passes of a role's model."""


@dataclass(frozen=True)
class ModelPasses:
    """A model with the engine that it is spread in, for the phases that go through it."""

    role: str
    model: ModelShapes
    state: TrainingState
    cost: PassCost
    device: str
    param_offload: bool = False
    optimizer_offload: bool = False
    checkpointing: bool = False
    """Whether the update computes activations again (`model.enable_gradient_checkpointing`)."""
    adapted: Adapted | None = None
    """The policy with its adapters, where `model` is its frozen base."""

    def resident(self, phase: str) -> dict[str, int]:
        """Bytes on the device throughout a phase; what is offloaded is still there in that in which it is loaded."""
        items = {"weights": self.state.weights, "optimizer": self.state.optimizer, "buffers": self.state.standing}
        # The reference is the actor's base.
        phases = PHASES[self.role] if self.adapted is None else (*PHASES[self.role], *PHASES["reference"])
        if self.param_offload and phase not in (*phases, LOADING):
            del items["weights"], items["buffers"]
        if self.optimizer_offload and phase != LOADING:
            del items["optimizer"]
        return {f"{self.role} {name}": size for name, size in items.items() if size}

    @property
    def host(self) -> int:
        """Bytes on the host in the device's place."""
        state = self.state
        weights = self.param_offload * (state.weights + state.standing)
        return state.host + weights + self.optimizer_offload * state.optimizer

    def forward(self, work: PassSize) -> dict[str, int]:
        """Bytes of a pass without gradients."""
        return {
            f"{self.role} gathered weights": self.state.gathered,
            "activations": self.cost.forward(work.tokens, work.longest),
            **self._chunk(work),
        }

    def update(self, work: PassSize) -> dict[str, int]:
        """The largest of the moments of an optimizer step: the head's gradient is there and all activations are, the
        last layer is in its backward pass, the first one is, the embedding's gradient is reduced, the optimizer
        steps."""
        cost, state = self.cost, self.state
        kept = cost.kept(work.tokens, work.longest, len(self.model.layers), checkpointing=self.checkpointing)
        layer = cost.layer(work.tokens, work.longest)
        in_layer = kept + (layer if self.checkpointing else work.tokens * cost.moment)
        gathered = {f"{self.role} gathered weights": state.gathered}
        gradients = {f"{self.role} gradients": state.gradients}
        # The first micro-batch of an optimizer step finds no gradients.
        before = gathered | (gradients if work.micro_batches > 1 else {})
        reduced = f"{self.role} gradients being reduced"
        brought = {f"{self.role} optimizer": state.optimizer} if self.optimizer_offload else {}
        moments = [
            before | {"activations": kept, reduced: state.head, **self._chunk(work)},
            before | {"activations": in_layer, reduced: state.head_left + state.layer},
            gathered | gradients | {"activations": layer, reduced: state.layer},
            gradients | {reduced: state.root + (state.added if work.micro_batches > 1 else 0)},
            gradients | {"optimizer step": state.stepped, **brought},
        ]
        return max(moments, key=lambda items: sum(items.values()))

    def _chunk(self, work: PassSize) -> dict[str, int]:
        if self.role not in ("actor", "reference"):
            return {}
        return {"log-prob chunks": chunk_bytes(work.predicted, self.model.vocabulary, self.device)}
