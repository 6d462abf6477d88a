"""Defines protocols for the state that a checkpoint stores: shards, plain values, tensors of one rank."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from rlhf.storage.file_parts import FileParts
from rlhf.storage.shards import Shards


class TrainState(Protocol):
    """A model in training (actor, critic) as the checkpoint sees it, without its backend."""

    def model_shards(self) -> Shards:
        """Return live views of this rank's weights and persistent buffers; loading writes into them."""

    def merged_shards(self) -> Shards:
        """Merge the adapters into the base in float32, and return this rank's part of each merged tensor, on the host.
        Only for models with adapters. Collective."""

    def merged_bytes(self) -> int:
        """Return the bytes of this rank's `merged_shards` without computing them. Not collective."""

    def optimizer_shards(self) -> Shards:
        """Return live views of this rank's optimizer moments and step counts, named `<parameter>.<moment>`."""

    def after_load(self) -> None:
        """Finish a load into the shards. For example, recompute other copies of the weights."""

    def extra_state(self) -> dict[str, Any]:
        """Return the other state, JSON-able: the LR schedule and the numbers of steps taken."""

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore `extra_state`."""

    def hf_parts(self) -> FileParts:
        """Map each weight that a Hugging Face folder stores as several tensors (experts) to these tensors."""

    def hf_files(self) -> Mapping[str, bytes]:
        """Return the small files of a Hugging Face folder: config, generation config, tokenizer, chat template, and
        adapter_config.json where adapters are trained."""


class MovingReference(Protocol):
    """A moving reference policy as the checkpoint sees it: weights that rarely change between saves."""

    updated_at: int
    """The step after which the reference last changed; 0 at the start. The same on every rank."""

    def shards(self) -> Shards:
        """Return live views of this rank's weights, float32; loading writes into them."""


class Stateful(Protocol):
    """State that a checkpoint saves in the driver state, as plain values. A save reads only the object of rank 0."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything on which the object's future depends, JSON-able."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""


class Carried(Protocol):
    """Tensors that each rank keeps for later steps, such as samples carried over by dynamic sampling."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return this rank's tensors by name; empty without any. Collective: each save calls it on every rank."""

    def load_tensors(self, saved: list[dict[str, Tensor]]) -> None:
        """Replace this rank's tensors. `saved` lists the `tensors` of the saving ranks that this rank replaces. The
        list may be empty, or have several entries if the run has fewer ranks than the save."""
