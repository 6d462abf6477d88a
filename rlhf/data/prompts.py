"""Provides a sequence of tokenized prompts, in this rank's memory or mapped from a file that all ranks share."""

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol

import numpy as np
import xxhash

from rlhf.data.items import Prompt, Row
from rlhf.data.tokens import LengthLimit, Lengths


class StoredPrompts(Protocol):
    """The prompts that remain after `data.overlong_prompts`, in memory or on disk."""

    fingerprint: str
    """Hash of the rows."""
    tokens_fingerprint: str
    """Hash of the tokens of all rows."""
    lengths: Lengths

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Prompt: ...

    def prompt_hashes(self) -> np.ndarray:
        """Return the hash of each prompt's tokens, [prompts] uint64."""
        ...


class PromptSet:
    """A sequence of `Prompt`s.

    `dropped` and `truncated` are the numbers of prompts that `data.overlong_prompts` removed or shortened.
    `fingerprint` is a hash of the remaining rows, `tokens_fingerprint` of their tokens.

    Raises:
        UserError: no prompts remain, or a prompt is too long with `data.overlong_prompts=error`.
    """

    def __init__(self, stored: StoredPrompts, limit: LengthLimit):
        limit.check(stored.lengths)
        limit.warn(stored.lengths)
        dropped = limit.overlong == "filter"
        self.dropped, self.truncated = (n := stored.lengths.too_long) * dropped, n * (not dropped)
        self._stored = stored
        self.fingerprint, self.tokens_fingerprint = stored.fingerprint, stored.tokens_fingerprint

    @classmethod
    def in_memory(cls, rows: Iterable[Row], tokenizer: Any, limit: LengthLimit) -> "PromptSet":
        """Return the prompts of `rows`, tokenized now, in the memory of this rank."""
        return cls(PromptsInMemory(rows, tokenizer, limit), limit)

    @property
    def count_text(self) -> str:
        """Return the numbers of prompts and of dropped prompts, in words for the terminal."""
        count = f"{len(self):,}"
        if not self.dropped:
            return count
        return f"{count} (of {len(self) + self.dropped:,}; the others are longer than data.max_prompt_length)"

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, i: int) -> Prompt:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self._stored[i]

    def prompt_hashes(self) -> np.ndarray:
        """Return the hash of each prompt's tokens, [prompts] uint64; equal prompts have equal hashes."""
        return self._stored.prompt_hashes()


def token_hash(token_ids: np.ndarray) -> int:
    """Return the xxh3-64 of a prompt's tokens (int32)."""
    return xxhash.xxh3_64_intdigest(token_ids.tobytes())


class PromptsInMemory:
    """Stores rows and their tokens in memory."""

    def __init__(self, rows: Iterable[Row], tokenizer: Any, limit: LengthLimit):
        self.lengths, self._rows = Lengths(), list[Row]()
        kept: list[list[int]] = []
        digest = PromptsHash()
        for row, token_ids in limit.tokenized(rows, tokenizer, self.lengths):
            digest.add(row, np.asarray(token_ids, "<i4"))
            self._rows.append(row)
            kept.append(token_ids)
        # Store one flat array, because a list of lists needs eight times the memory.
        self._ends = np.cumsum([len(token_ids) for token_ids in kept], dtype=np.int64)
        self._tokens = np.fromiter(chain.from_iterable(kept), dtype=np.int32, count=sum(map(len, kept)))
        self.fingerprint, self.tokens_fingerprint = digest.of_rows(), digest.of_tokens()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Prompt:
        row = self._rows[i]
        start = self._ends[i - 1] if i else 0
        return Prompt(
            index=row.index,
            messages=row.messages,
            token_ids=self._tokens[start : self._ends[i]].tolist(),
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
            columns=row.columns,
        )

    def prompt_hashes(self) -> np.ndarray:
        prompts = np.split(self._tokens, self._ends[:-1]) if len(self) else []
        return np.fromiter(map(token_hash, prompts), np.uint64, count=len(self))


class PromptsHash:
    """Hashes rows in order (xxh3-128), with all fields that can affect a run. A second hash covers only the tokens."""

    def __init__(self) -> None:
        self.rows, self._rows, self._tokens = 0, xxhash.xxh3_128(), xxhash.xxh3_128()

    def add(self, row: Row, token_ids: np.ndarray) -> str:
        """Add the next row and its tokens (int32); return the row's JSON that is hashed."""
        columns = [row.columns] if row.columns else []
        text = json.dumps([row.messages, row.data_source, row.ground_truth, row.extra_info, *columns], default=str)
        self.rows += 1
        self._rows.update(text.encode())
        self._rows.update(b"\n")
        self._tokens.update(len(token_ids).to_bytes(8, "little"))
        self._tokens.update(token_ids.tobytes())
        return text

    def of_rows(self) -> str:
        return self._rows.hexdigest()

    def of_tokens(self) -> str:
        return self._tokens.hexdigest()
