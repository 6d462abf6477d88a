"""Encodes adapters, their settings and the digests of all weights as one message from the trainer to a server."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from rlhf.rollout.weight_digest import Digest, Digests

_ABOUT = "rlhf"


@dataclass(frozen=True)
class AdapterMessage:
    """Adapters for a server that has their base."""

    tensors: Mapping[str, Tensor]  # by names in checkpoints, in `dtype`
    settings: Mapping[str, Any]  # `adapter_settings`
    digests: Digests  # of base weights (by names in Hugging Face files) and adapters (by names of factors)
    dtype: str
    label: str

    def encode(self) -> bytes:
        """Return a safetensors file with everything else in its metadata."""
        about = {name: value for name, value in vars(self).items() if name != "tensors"}
        return save(dict(self.tensors), {_ABOUT: json.dumps(about)})

    @classmethod
    def decode(cls, data: bytes) -> "AdapterMessage":
        about = json.loads(_metadata(data)[_ABOUT])
        digests: dict[str, Digest] = {name: tuple(found) for name, found in about["digests"].items()}
        return cls(**about | {"tensors": load(data), "digests": digests})


def _metadata(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])["__metadata__"]


def address(**fetch_arguments: Any) -> str:
    """Return the arguments of `pull.fetch`, without the secret, as text.

    vLLM stores the text as the adapter's path, sends it with each request, and hashes it for each block of the prefix
    cache. So it must be short.
    """
    return json.dumps(fetch_arguments)


def is_address(path: str) -> bool:
    return path.startswith("{")


def parse_address(path: str) -> dict[str, Any]:
    """Return the arguments of `pull.fetch`."""
    return json.loads(path)
