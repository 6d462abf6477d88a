"""Counts the memory of one model on a rank's device: resident bytes, and bytes of its passes."""

from dataclasses import dataclass

from rlhf.planning.activations import PassCost, chunk_bytes, head_gradient_bytes
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
"""Role -> phases with passes of its model."""


@dataclass(frozen=True)
class ModelPasses:
    """A model in its training engine, on one rank."""

    role: str
    model: ModelShapes
    state: TrainingState
    cost: PassCost
    device: str
    param_offload: bool = False
    optimizer_offload: bool = False
    checkpointing: bool = False
    """Whether the update recomputes activations (`model.enable_gradient_checkpointing`)."""
    adapted: Adapted | None = None
    """The policy with adapters, if `model` is a frozen base; otherwise None."""

    def resident(self, phase: str) -> dict[str, int]:
        """Return the bytes on the device throughout a phase. While models load, tensors are not offloaded yet."""
        items = {"weights": self.state.weights, "optimizer": self.state.optimizer, "buffers": self.state.permanent}
        # With adapters, the reference passes use the actor's base.
        phases = PHASES[self.role] if self.adapted is None else (*PHASES[self.role], *PHASES["reference"])
        if self.param_offload and phase not in (*phases, LOADING):
            del items["weights"], items["buffers"]
        if self.optimizer_offload and phase != LOADING:
            del items["optimizer"]
        return {f"{self.role} {name}": size for name, size in items.items() if size}

    @property
    def host(self) -> int:
        """Return the bytes of offloaded tensors on the host."""
        state = self.state
        weights = self.param_offload * (state.weights + state.permanent)
        return state.host + weights + self.optimizer_offload * state.optimizer

    def forward(self, work: PassSize) -> dict[str, int]:
        """Return the bytes of a pass without gradients, by use."""
        return {
            f"{self.role} gathered weights": self.state.gathered,
            "activations": self.cost.forward(work.tokens, work.longest),
            **self._chunk(work),
        }

    def update(self, work: PassSize) -> dict[str, int]:
        """Return the bytes of an optimizer step, by use, at the point with the most memory.

        The points are: the head's gradient with all activations, the backward passes of the last and of the first
        layer, the reduction of the embedding's gradient, and the optimizer's step.
        """
        cost, state = self.cost, self.state
        kept = cost.kept(work.tokens, work.longest, len(self.model.layers), checkpointing=self.checkpointing)
        layer = cost.layer(work.tokens, work.longest)
        in_layer = kept + (layer if self.checkpointing else work.tokens * cost.transient)
        gathered = {f"{self.role} gathered weights": state.gathered}
        gradients = {f"{self.role} gradients": state.gradients}
        # `before` includes the gradients of earlier micro-batches, if there are any.
        before = gathered | (gradients if work.micro_batches > 1 else {})
        reduced = f"{self.role} gradients being reduced"
        loaded = {f"{self.role} optimizer": state.optimizer} if self.optimizer_offload else {}
        points = [
            before | {"activations": kept, reduced: state.head + self._head_gradients(work), **self._chunk(work)},
            before | {"activations": in_layer, reduced: state.head_left + state.layer},
            gathered | gradients | {"activations": layer, reduced: state.layer},
            gradients | {reduced: state.root + (state.micro_batch_gradients if work.micro_batches > 1 else 0)},
            gradients | {"optimizer step": state.step_temporaries, **loaded},
        ]
        return max(points, key=lambda items: sum(items.values()))

    def _head_gradients(self, work: PassSize) -> int:
        trains_head = self.role == "actor" and self.adapted is None
        return head_gradient_bytes(work.predicted, self.model.vocabulary, self.device) if trains_head else 0

    def _chunk(self, work: PassSize) -> dict[str, int]:
        if self.role not in ("actor", "reference"):
            return {}
        return {"log-prob chunks": chunk_bytes(work.predicted, self.model.vocabulary, self.device)}
