"""Files of the policy for an engine that builds the model by itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.storage.files import write_folder


@dataclass(frozen=True)
class PolicyFiles:
    """The policy as vLLM is told of it; its weights come with the first update."""

    files: Mapping[str, bytes]
    """The small files of its Hugging Face folder, by name."""
    folder: Path
    """Where they are written; the same at every start, since vLLM's compile cache depends on its name."""
    eos: Sequence[int]
    """The tokens that end a response."""
    max_model_len: int
    """Tokens of the longest prompt with its response."""

    def write(self) -> None:
        """Write the files."""
        write_folder(self.folder, self.files)

    @property
    def vocab_size(self) -> int:
        """The vocabulary size that config.json says."""
        config = json.loads(self.files["config.json"])
        return config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"]
