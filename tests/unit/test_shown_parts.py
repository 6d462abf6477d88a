"""Parts of the ranks in the rollouts that people get to see: as many as are asked for, as evenly as can be."""

import pytest

from rlhf.experience.shown_samples import _parts


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
