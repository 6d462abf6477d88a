"""Files of the policy for an engine that builds the model itself (vLLM)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.storage.files import write_folder


@dataclass(frozen=True)
class PolicyFiles:
    """The policy as a Hugging Face folder without weights, from which vLLM builds the model.

    The first weight sync brings the weights.
    """

    files: Mapping[str, bytes]
    """The small files of the Hugging Face folder, by name."""
    folder: Path
    """Path of the folder. It is the same at every start, because vLLM's compile cache depends on it."""
    eos: Sequence[int]
    """The tokens that end a response."""
    max_model_len: int
    """Most tokens of a prompt with its response."""

    def write(self) -> None:
        """Write the files."""
        write_folder(self.folder, self.files)

    @property
    def vocab_size(self) -> int:
        """The vocabulary size in config.json."""
        config = json.loads(self.files["config.json"])
        return config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"]
