"""Compares the aggregated loss and its gradient with loops over floats, for any split and padding."""

import random

import pytest
import torch

from rlhf.algorithms.aggregation import loss_count, loss_sum
from rlhf.config.schema.actor import LOSS_AGG_MODES
from tests.support import float_reference as reference
from tests.support.tables import MODES, SLOPES, close, random_mask, random_table, slopes, tensor


def test_every_configured_mode_is_tested():
    assert set(MODES) == set(LOSS_AGG_MODES)


@pytest.mark.parametrize("scale", [1, 7, 512])
@pytest.mark.parametrize("mode", MODES)
def test_split_and_padding_do_not_change_the_loss(mode, scale):
    rng = random.Random(2)
    for _ in range(25):
        rows, columns = rng.randint(2, 6), rng.randint(1, 6)
        values, mask = random_table(rng, rows, columns, 1.0), random_mask(rng, rows, columns)
        m, v = torch.tensor(mask), tensor(values, mask).requires_grad_()
        expected = reference.aggregate(values, mask, mode, scale)
        whole = loss_sum(v, m, mode, scale) / loss_count(m, mode)
        whole.backward()
        close(whole.detach(), expected)
        close(v.grad, slopes(lambda values, mask=mask: reference.aggregate(values, mask, mode, scale), values), SLOPES)
        assert not v.grad[m == 0].any()

        cut = rng.randint(1, rows - 1)
        wider = torch.nn.functional.pad(v.detach(), (0, 3), value=torch.inf), torch.nn.functional.pad(m, (0, 3))
        parts = [(v[:cut].detach(), m[:cut]), (wider[0][cut:], wider[1][cut:])]
        total = sum(loss_sum(*part, mode, scale) for part in parts) / sum(loss_count(part[1], mode) for part in parts)
        close(total, expected)
