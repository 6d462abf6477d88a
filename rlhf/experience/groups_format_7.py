"""Converts carried-over groups from checkpoints of format 7 (release 0.1.0) to the current format."""

import json

from rlhf.rollout import Sample
from rlhf.rollout.sample_codec import Arrays, joined, split, to_arrays

OF_SAMPLES = ("finish_reasons", "versions", "observations")
"""Fields of a record that are lists with an entry per sample."""


def from_format_7(arrays: Arrays) -> Arrays:
    """Return the arrays in the current format, without loss.

    In format 7 each prompt precedes its samples in the token ids (int64). Log-probs are float64, though engines
    computed them in float32. The records contain a sample's other fields.
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
