"""Warns of training prompts that repeat, and of validation prompts that are also training prompts."""

import logging

import numpy as np

from rlhf.data.prompts import PromptSet

log = logging.getLogger(__name__)

FEW = 0.01
"""Fraction of repeated training prompts up to which there is no warning."""


def warn_of_repeats(train_set: PromptSet, val_set: PromptSet | None) -> None:
    """Log at most one warning of repeats, and one of shared prompts. Prompts are equal if their tokens are equal."""
    different = np.unique(train_set.prompt_hashes())
    if (repeated := len(train_set) - len(different)) > FEW * len(train_set):
        log.warning(
            "data.train_files: %d of %d prompts repeat an earlier prompt, so an epoch trains on them several times. "
            "Remove the copies, unless you want this.",
            repeated,
            len(train_set),
        )
    if val_set is not None and (shared := int(np.isin(val_set.prompt_hashes(), different).sum())):
        log.warning(
            "data.val_files: %d of %d prompts are also in data.train_files, so val metrics include prompts that the "
            "policy was trained on. Set data.val_files to held-out prompts.",
            shared,
            len(val_set),
        )
