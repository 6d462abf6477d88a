"""Parses the small files of a checkpoint: the driver state, JSON, and safetensors."""

from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from rlhf.checkpoint.state.driver_state import parse_driver_state
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import DRIVER_STATE
from rlhf.storage.reading import parse_json


def parse_document(name: str, content: bytes, step: int) -> Any:
    """Parse a small file of the checkpoint of `step`; raise DamagedCheckpoint if the content does not have the
    format that `name` implies."""
    if name == DRIVER_STATE:
        return parse_driver_state(content, name, step)
    if name.endswith(".json"):
        return parse_json(content, name)
    try:
        # Clone, so that no tensor keeps the bytes of all tensors alive. Promise 14: safetensors and JSON only.
        return {tensor: value.clone() for tensor, value in load_safetensors(content).items()}
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{name}: {error}") from None
