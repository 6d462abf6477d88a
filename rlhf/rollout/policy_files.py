"""Writes the policy's config and tokenizer for vLLM, which builds the model itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.storage.files import write_folder


@dataclass(frozen=True)
class PolicyFiles:
    """The policy as a Hugging Face folder for vLLM, without weights: the first weight sync sends them."""

    files: Mapping[str, bytes]  # contents of the folder's small files by name
    folder: Path  # the same path at each start, because vLLM's compile cache depends on the path
    eos: Sequence[int]  # tokens that end a response
    max_model_len: int  # limit of prompt plus response in tokens
    tokenizer: Any = None  # finds a stop string that begins in the earlier part of a continued response

    def write(self) -> None:
        write_folder(self.folder, self.files)

    @property
    def vocab_size(self) -> int:
        config = json.loads(self.files["config.json"])
        return config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"]
