"""Encodes samples as named 1-D arrays, and arrays as bytes with a layout that JSON can express.

Ranks exchange samples as these arrays, checkpoints store the arrays, and the journal writes and hashes their bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, get_args

import numpy as np

from rlhf.rollout.sample import FinishReason, Sample, as_spans
from rlhf.rollout.sampling_mask import SamplingMask, joined_masks

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
FIELDS = 6
"""Numbers per row: uid, sample, tokens, index of the finish reason in REASONS, and the lengths of `Sample.versions` and
`Sample.observations`."""
Arrays = dict[str, np.ndarray]
Layout = dict[str, tuple[str, int]]
"""Array name -> type in NumPy's notation, and length. The entries have the order of the arrays' bytes."""


def to_arrays(samples: Sequence[Sample]) -> Arrays:
    """Return `samples` as little-endian 1-D arrays, without loss.

    `token_ids` (int32) and `log_probs` (float32) are concatenated over the samples. `rows` (FIELDS numbers per sample),
    `versions` and `observations` (pairs) are flattened int64. If any sample has `Sample.forks`, `forks` are
    flattened int64 triples: index of the sample, start and prompt of the fork. If any sample has a sampling mask,
    `mask_counts` and `mask_token_ids` (int32) are concatenated over the samples.
    """
    rows = [
        (s.uid, s.sample, len(s), REASONS.index(s.finish_reason), len(s.versions), len(s.observations)) for s in samples
    ]
    forks = [(i, *fork) for i, sample in enumerate(samples) for fork in sample.forks]
    arrays = {
        "token_ids": joined([sample.token_ids for sample in samples], "<i4"),
        "log_probs": joined([sample.log_probs for sample in samples], "<f4"),
        "rows": np.array(rows, "<i8").reshape(-1),
        "versions": np.array([run for sample in samples for run in sample.versions], "<i8").reshape(-1),
        "observations": np.array([span for sample in samples for span in sample.observations], "<i8").reshape(-1),
    }
    if forks:
        arrays["forks"] = np.array(forks, "<i8").reshape(-1)
    if (mask := joined_masks([(sample.sampling_mask, len(sample)) for sample in samples])) is not None:
        arrays |= {"mask_counts": mask.counts.astype("<i4"), "mask_token_ids": mask.token_ids.astype("<i4")}
    return arrays


def from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Sample]:
    """Return the samples that `to_arrays` encoded, with token ids, log-probs and masks as views of `arrays`.

    Raises:
        ValueError: the lengths of the arrays contradict their rows.
    """
    _check_lengths(arrays)
    forks: dict[int, list[list[int]]] = {}
    for i, *fork in arrays["forks"].reshape(-1, 3).tolist() if "forks" in arrays else []:
        forks.setdefault(i, []).append(fork)
    runs, spans = (iter(arrays[name].reshape(-1, 2).tolist()) for name in ("versions", "observations"))
    rows = arrays["rows"].reshape(-1, FIELDS).tolist()
    token_ids, log_probs = (split(arrays[name], [row[2] for row in rows]) for name in ("token_ids", "log_probs"))
    masks = _masks(arrays, [row[2] for row in rows])
    samples = []
    for i, (row, ids, own, mask) in enumerate(zip(rows, token_ids, log_probs, masks, strict=True)):
        uid, number, _, reason, of_runs, of_spans = row
        versions, observations = as_spans(islice(runs, of_runs)), as_spans(islice(spans, of_spans))
        own_forks = as_spans(forks.get(i, ()))
        samples.append(Sample(uid, number, ids, own, REASONS[reason], versions, observations, own_forks, mask))
    return samples


def _masks(arrays: Mapping[str, np.ndarray], lengths: Sequence[int]) -> list[SamplingMask | None]:
    if "mask_counts" not in arrays:
        return [None] * len(lengths)
    counts = list(split(arrays["mask_counts"], lengths))
    token_ids = split(arrays["mask_token_ids"], [int(of_sample.sum()) for of_sample in counts])
    return [SamplingMask.of(*of_sample) for of_sample in zip(counts, token_ids, strict=True)]


def _check_lengths(arrays: Mapping[str, np.ndarray]) -> None:
    counts = arrays["rows"].reshape(-1, FIELDS)[:, [2, 4, 5]]
    tokens, runs, spans = counts.sum(axis=0).tolist()
    expected = {"token_ids": tokens, "log_probs": tokens, "versions": 2 * runs, "observations": 2 * spans}
    if "mask_counts" in arrays:
        expected |= {"mask_counts": tokens, "mask_token_ids": int(arrays["mask_counts"].sum())}
    found = {name: arrays[name].size for name in expected}
    if found != expected or counts.min(initial=0) < 0:
        raise ValueError(f"arrays of samples have {found} numbers; their rows need {expected}")


def joined(parts: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Return all `parts` concatenated to one array of `dtype`. `parts` may be empty."""
    return np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype)


def split(values: np.ndarray, lengths: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield views of consecutive parts of `values` with these lengths."""
    start = 0
    for length in lengths:
        yield values[start : start + length]
        start += length


def layout_of(arrays: Arrays) -> Layout:
    """Return the types and lengths of the arrays, as `from_bytes` needs them."""
    return {name: (array.dtype.str, len(array)) for name, array in arrays.items()}


def to_bytes(arrays: Arrays) -> list[memoryview]:
    """Return the memory of each array, without a copy."""
    return [array.data.cast("B") if len(array) else memoryview(b"") for array in arrays.values()]


def from_bytes(content: bytes | memoryview, layout: Mapping[str, Sequence[Any]]) -> Arrays:
    """Return the arrays as views of `content`, the concatenated bytes of `to_bytes`."""
    arrays, offset = {}, 0
    for name, (dtype, length) in layout.items():
        arrays[name] = np.frombuffer(content, dtype, length, offset)
        offset += arrays[name].nbytes
    return arrays
