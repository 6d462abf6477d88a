"""Stores, for each token of a response, the tokens among which the engine sampled it (`rollout.sampling_mask`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens that `min_p`, `top_k` and `top_p` kept when the engine sampled each of T response tokens.

    The policy's log-probs are renormalized over these tokens, so that policy and behaviour have the same support, as
    in DeepSeek-V3.2 (arXiv 2512.02556, section 3.1, "Keep Sampling Mask").
    """

    counts: np.ndarray
    """[T] int32: kept tokens. 0 at observations, and at tokens that were sampled without `rollout.sampling_mask`: their
    log-probs are those of the whole vocabulary."""
    token_ids: np.ndarray
    """[sum of `counts`] int32: the ids of the kept tokens, at least one, in the order of the response."""

    def __post_init__(self) -> None:
        types, total = (self.counts.dtype, self.token_ids.dtype), int(self.counts.sum())
        if types != (np.int32, np.int32) or self.counts.min(initial=0) < 0 or not 0 < total == len(self.token_ids):
            raise ValueError(f"sampling masks of {total} tokens in all have {len(self.token_ids)} token ids")

    @classmethod
    def of(cls, counts: np.ndarray, token_ids: np.ndarray) -> "SamplingMask | None":
        """Return the mask, or None if it has no kept tokens."""
        return cls(counts, token_ids) if len(token_ids) else None

    @classmethod
    def of_tokens(cls, kept: Sequence[np.ndarray]) -> "SamplingMask | None":
        """Return the mask of each token's kept ids, int32 [at least 0]; None if it has no kept tokens."""
        return cls.of(np.array(list(map(len, kept)), np.int32), np.concatenate(kept)) if kept else None

    @property
    def width(self) -> int:
        """Largest number of kept tokens at one token of the response."""
        return int(self.counts.max())

    def rows(self, width: int) -> np.ndarray:
        """Return the kept ids as [T, width] int32, padded with -1."""
        rows = np.full((len(self.counts), width), -1, np.int32)
        rows[np.arange(width) < self.counts[:, None]] = self.token_ids
        return rows


def mask_part(mask: SamplingMask | None, start: int, end: int) -> SamplingMask | None:
    """Return the mask of the response tokens [start, end); None if none of them has kept tokens."""
    if mask is None:
        return None
    first, last = int(mask.counts[:start].sum()), int(mask.counts[:end].sum())
    return SamplingMask.of(mask.counts[start:end], mask.token_ids[first:last])


def joined_masks(parts: Sequence[tuple[SamplingMask | None, int]]) -> SamplingMask | None:
    """Return the mask of consecutive parts of a response, each given by its mask and its number of tokens."""
    masks = [mask for mask, _ in parts if mask is not None]
    if not masks:
        return None
    counts = [np.zeros(tokens, np.int32) if mask is None else mask.counts for mask, tokens in parts]
    return SamplingMask(np.concatenate(counts), np.concatenate([mask.token_ids for mask in masks]))
