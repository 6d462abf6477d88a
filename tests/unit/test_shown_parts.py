"""Shown samples: how many each rank shows, and a sample's mean advantage over the tokens that the policy wrote."""

from dataclasses import replace

import pytest
import torch

from rlhf.experience.shown_samples import _parts
from rlhf.learning.credit import Credit
from tests.support.tiny_updates import random_batch, with_observations


@pytest.mark.parametrize(
    ("held", "count", "parts"),
    [
        ([16], 8, [8]),
        ([16, 16], 3, [2, 1]),
        ([16, 16, 16, 16], 2, [1, 1, 0, 0]),
        ([0, 4, 16], 8, [0, 4, 4]),
        ([0, 1, 16], 8, [0, 1, 7]),
        ([1, 2], 8, [1, 2]),
    ],
)
def test_parts(held, count, parts):
    assert _parts(held, count) == parts


def test_the_mean_advantage_is_of_written_tokens():
    batch = with_observations(random_batch(seed=2, samples=6, response=(2, 9)))
    batch = replace(batch, advantages=torch.full(batch.response_mask.shape, 1.5) * batch.response_mask)
    assert Credit(batch.advantages, None, batch.response_mask).means() == [1.5] * 6
