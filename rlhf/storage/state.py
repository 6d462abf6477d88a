"""State that a checkpoint stores, as protocols that its owners fulfil: shards, plain values, tensors of one rank."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from rlhf.storage.file_parts import FileParts
from rlhf.storage.shards import Shards


class TrainState(Protocol):
    """A model in training (actor, critic) as the checkpoint sees it: state, not a backend."""

    def model_shards(self) -> Shards:
        """Live views of this rank's weights and persistent buffers; loading writes into them."""

    def merged_shards(self) -> Shards:
        """Shards of base and adapters in one, float32, made for this call on the host: each rank has a part of each
        tensor. Only where adapters are trained. Collective."""

    def merged_bytes(self) -> int:
        """Bytes of this rank's `merged_shards`. Makes none, and is not collective."""

    def optimizer_shards(self) -> Shards:
        """Live views of this rank's optimizer moments and step counts, named `<parameter>.<moment>`."""

    def after_load(self) -> None:
        """Finish a resume that has written to the shards, such as by making other weights from them."""

    def extra_state(self) -> dict[str, Any]:
        """JSON-able rest: the LR schedule."""

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over `extra_state`."""

    def hf_parts(self) -> FileParts:
        """The tensors of a Hugging Face folder, where they are others than those of `model_shards`."""

    def hf_files(self) -> Mapping[str, bytes]:
        """The small files of a Hugging Face folder: config, generation config, tokenizer, chat template, and
        adapter_config.json where adapters are trained."""


class MovingReference(Protocol):
    """A reference policy that moves, as the checkpoint sees it: weights that few saves find changed."""

    updated_at: int
    """The step after which it last changed; 0 at the start. The same on every rank."""

    def shards(self) -> Shards:
        """Live views of this rank's weights, float32; loading writes into them."""


class Stateful(Protocol):
    """State that goes along with the driver's: plain values, the same on every rank, or the driver's count."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that its future depends on, JSON-able."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`."""


class Carried(Protocol):
    """Tensors that each rank takes along to later steps for itself, such as what dynamic sampling carries over."""

    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's, by name; empty when there are none. Collective: each save asks on every rank."""

    def load_tensors(self, saved: list[dict[str, Tensor]]) -> None:
        """Take over the `tensors` of these ranks and forget all others: one entry per rank that had any, none to many
        of them."""
