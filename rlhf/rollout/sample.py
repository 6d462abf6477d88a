"""Defines a sample: one response with its tokens and log-probs, as NumPy arrays from the engine to the batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from rlhf.rollout.sampling_mask import SamplingMask, joined_masks, mask_part

FinishReason = Literal["stop", "length", "partial", "failed"]
Spans = tuple[tuple[int, int], ...]
ROW = 1 << 32
"""Row r of an episode has the number `sample + r * ROW`. So the rows of an episode share no noise with each other, and
none with the rows of other samples."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Response number `sample` to the prompt `uid`, of T tokens.

    The arrays are NumPy's and not torch's: slices are cheap views, files and hashes use their bytes directly, and
    engines outside the trainer need no torch. Nobody writes to the arrays.

    Log-probs are float32, as every engine computes them. A server sends decimals, which the client rounds to float32
    once. From there to the batch, no bit of a sample changes.
    """

    uid: int
    sample: int
    token_ids: np.ndarray
    """[T] int32, with the EOS token if one was drawn."""
    log_probs: np.ndarray
    """[T] float32: natural logarithms of probabilities under the distribution that each token was drawn from. Values at
    observations are never read."""
    finish_reason: FinishReason
    """`stop` for EOS, stop strings and finished episodes; `length` if tokens or turns ran out. `partial`: a later
    request continues the response. `failed`: the environment failed; such a sample has no tokens and no reward."""
    versions: Spans
    """Runs (version, end) in order. The policy after `version` steps drew the tokens from the previous run's end to
    `end`. The last run ends with the response."""
    observations: Spans = ()
    """Spans [start, end) in order: tokens that a tool or an environment wrote. The policy wrote all other tokens."""
    forks: Spans = ()
    """Pairs (start, prompt) in order. An agent rewrote its history at each `start`: there a new row begins, whose model
    passes see no earlier token. The row's first `prompt` tokens are its prompt."""
    sampling_mask: SamplingMask | None = None
    """The tokens among which each token was sampled; None if no token was sampled with `rollout.sampling_mask`."""

    def __post_init__(self) -> None:
        types = self.token_ids.dtype, self.log_probs.dtype
        if types != (np.int32, np.float32) or self.log_probs.shape != (len(self),):
            raise ValueError(f"token ids {types[0]}{list(self.token_ids.shape)}, log-probs {types[1]}")
        bounds = [0, *(bound for span in self.observations for bound in span), len(self)]
        if bounds != sorted(bounds):
            raise ValueError(f"observations {self.observations} are not spans of {len(self)} tokens in order")
        ends = [end for _, end in self.versions]
        if ends != sorted(ends) or ends[-1:] != [len(self)]:
            raise ValueError(f"versions {self.versions} are not runs that end with {len(self)} tokens")
        bounds = [0, *(bound for start, prompt in self.forks for bound in (start, start + prompt)), len(self)]
        if self.forks and bounds != sorted(set(bounds)):
            raise ValueError(f"forks {self.forks} are not rows of {len(self)} tokens in order")
        if self.sampling_mask is not None and len(self.sampling_mask.counts) != len(self):
            raise ValueError(f"{len(self.sampling_mask.counts)} sampling masks for {len(self)} tokens")

    @classmethod
    def of(
        cls,
        uid: int,
        sample: int,
        token_ids: Sequence[int] | np.ndarray,
        log_probs: Sequence[float] | np.ndarray,
        finish_reason: FinishReason,
        version: int = 0,
        observations: Iterable[Sequence[int]] = (),
    ) -> "Sample":
        """Return a sample from sequences of numbers, with all tokens by the policy after `version` steps."""
        arrays = np.asarray(token_ids, np.int32), np.asarray(log_probs, np.float32)
        return cls(uid, sample, *arrays, finish_reason, ((version, len(token_ids)),), as_spans(observations))

    def extended(
        self,
        token_ids: Sequence[int] | np.ndarray,
        log_probs: Sequence[float] | np.ndarray,
        finish_reason: FinishReason,
        version: int,
        sampling_mask: SamplingMask | None = None,
    ) -> "Sample":
        """Return the sample with further tokens, which the policy drew after `version` steps.

        `sampling_mask` is that of the further tokens.
        """
        new = Sample.of(self.uid, self.sample, token_ids, log_probs, finish_reason, version)
        total = len(self) + len(new)
        runs = [run for run in self.versions if run[1]]
        if runs and (runs[-1][0] == version or not len(new)):
            version = runs.pop()[0]
        return replace(
            new,
            token_ids=np.concatenate([self.token_ids, new.token_ids]),
            log_probs=np.concatenate([self.log_probs, new.log_probs]),
            versions=(*runs, (version, total)),
            observations=self.observations,
            sampling_mask=joined_masks([(self.sampling_mask, len(self)), (sampling_mask, len(new))]),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        """Return whether all bits are equal: -0.0 differs from 0.0, and a NaN equals itself."""
        return isinstance(other, Sample) and self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    @property
    def version(self) -> int:
        """Number of steps that the policy had done when it drew the oldest of the tokens."""
        return min(version for version, _ in self.versions)

    @property
    def written(self) -> int:
        """Number of tokens that the policy wrote."""
        return len(self) - sum(end - start for start, end in self.observations)

    def rows(self, prompt_ids: Sequence[int]) -> "list[SampleRow]":
        """Return the sequences of the model's passes, in the order of time. `prompt_ids` is the first row's prompt."""
        if not self.forks:
            return [SampleRow(prompt_ids, self)]
        ends = [*(start for start, _ in self.forks), len(self)]
        rows = [SampleRow(prompt_ids, self.part(0, ends[0], 0))]
        for number, (start, prompt) in enumerate(self.forks, 1):
            first = start + prompt
            rows.append(SampleRow(self.token_ids[start:first].tolist(), self.part(first, ends[number], number)))
        return rows

    def part(self, start: int, end: int, row: int) -> "Sample":
        """Return the tokens from `start` to `end`, at least one, as the sample of row number `row`."""
        begins = [0, *(run_end for _, run_end in self.versions)]
        runs = [
            (version, min(run_end, end) - start)
            for begin, (version, run_end) in zip(begins, self.versions, strict=False)
            if begin < end and run_end > start
        ]
        spans = [(max(first, start) - start, min(last, end) - start) for first, last in self.observations]
        return Sample(
            self.uid,
            self.sample + row * ROW,
            self.token_ids[start:end],
            self.log_probs[start:end],
            self.finish_reason,
            tuple(runs),
            tuple((first, last) for first, last in spans if first < last),
            sampling_mask=mask_part(self.sampling_mask, start, end),
        )

    def mask(self) -> np.ndarray:
        """Return [T] bool: True on the tokens that the policy wrote, False on observations."""
        mask = np.ones(len(self), np.bool_)
        for start, end in self.observations:
            mask[start:end] = False
        return mask

    def _facts(self) -> tuple[object, ...]:
        mask = () if self.sampling_mask is None else (self.sampling_mask.counts, self.sampling_mask.token_ids)
        arrays = [array.tobytes() for array in (self.token_ids, self.log_probs, *mask)]
        return self.uid, self.sample, *arrays, self.finish_reason, self.versions, self.observations, self.forks


class SampleRow(NamedTuple):
    """One sequence of the model's passes: a sample, or a row of a sample with forks."""

    prompt_ids: Sequence[int]
    response: Sample


def as_spans(pairs: Iterable[Sequence[int]]) -> Spans:
    """Return pairs of integers, such as rows of an array, as tuples of int."""
    return tuple((int(first), int(second)) for first, second in pairs)
