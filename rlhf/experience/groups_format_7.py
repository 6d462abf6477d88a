"""Converts carried-over groups from checkpoints of format 7 (release 0.1.0) to the present form."""

import json

from rlhf.rollout import Sample
from rlhf.rollout.sample_codec import Arrays, joined, split, to_arrays

OF_SAMPLES = ("finish_reasons", "versions", "observations")
"""Fields of a record with a list entry for each sample."""


def is_format_7(arrays: Arrays) -> bool:
    """Return whether the arrays are of format 7, where the prompts are part of `token_ids`."""
    return "prompt_ids" not in arrays


def from_format_7(arrays: Arrays) -> Arrays:
    """Return the arrays in the present form, without loss.

    Format 7 has token ids (int64) in which each prompt precedes its samples, log-probs in float64 that engines computed
    in float32, and the rest of a sample in the records.
    """
    records = json.loads(arrays["records"].tobytes())
    lengths = [(record["prompt_length"], *record["response_lengths"]) for record in records]
    token_ids = split(arrays["token_ids"], [length for of_group in lengths for length in of_group])
    log_probs = split(arrays["log_probs"], [length for _, *responses in lengths for length in responses])
    prompts, samples = [], []
    for record in records:
        prompts.append(next(token_ids))
        for number, facts in enumerate(zip(*(record[name] for name in OF_SAMPLES), strict=True)):
            samples.append(Sample.of(record["uid"], number, next(token_ids), next(log_probs), *facts))
    return to_arrays(samples) | {"prompt_ids": joined(prompts, "<i4"), "records": arrays["records"]}
