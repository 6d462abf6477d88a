"""Compares values and gradients of the KL estimators with loops over floats, and tests the adaptive coefficient."""

import math
import random

import pytest
import torch

from rlhf.algorithms.kl import adapted_coefficient, corrected_kl, kl_estimate, kl_metric
from rlhf.config.schema.actor import KL_KINDS
from tests.support import float_reference as reference
from tests.support.tables import SLOPES, close, random_table, slopes, tensor


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_value_and_gradient(kind, scale):
    """Kinds with `+` have the gradient of k2."""
    rng = random.Random(1)
    of_value = kind.removesuffix("+")
    of_gradient = "k2" if kind.endswith("+") else kind
    for _ in range(25):
        rows, columns = rng.randint(1, 3), rng.randint(1, 4)
        new, ref = random_table(rng, rows, columns, scale), random_table(rng, rows, columns, scale)

        def table(new, kind, ref=ref):
            return [
                [reference.kl(n, r, kind) for n, r in zip(ns, rs, strict=True)] for ns, rs in zip(new, ref, strict=True)
            ]

        x = tensor(new).requires_grad_()
        ours = kl_estimate(x, tensor(ref), kind)
        ours.sum().backward()
        close(ours.detach(), table(new, of_value))
        close(x.grad, slopes(lambda new, table=table: sum(map(sum, table(new, of_gradient))), new), SLOPES)


def test_expectations_under_the_policy():
    """The expectations of k1 and k3 equal the KL, and the expected gradients of k2 and `+` equal the KL's."""
    torch.manual_seed(0)
    # The distributions are so close that k3 is not clamped.
    logits, ref = torch.rand(2, 9, dtype=torch.float64).requires_grad_().unbind()
    log_probs, ref_log_probs = logits.log_softmax(0), ref.log_softmax(0)
    exact = (log_probs.exp() * (log_probs - ref_log_probs)).sum()
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for kind in ("k1", "k3"):
        close((log_probs.exp() * kl_estimate(log_probs, ref_log_probs, kind)).sum().detach(), exact.detach())
    for kind in ("k2", "k1+", "k3+", "abs+"):
        estimate = (log_probs.exp().detach() * kl_estimate(log_probs, ref_log_probs, kind)).sum()
        close(torch.autograd.grad(estimate, logits, retain_graph=True)[0], gradient)


@pytest.mark.parametrize("kind", [kind for kind in KL_KINDS if not kind.startswith("abs")])
def test_corrected_expectations_under_an_older_policy(kind):
    """Under an older policy, expected gradients equal the KL's, and expected values equal the KL except for k2."""
    torch.manual_seed(1)
    logits, ref, old = torch.rand(3, 9, dtype=torch.float64).requires_grad_().unbind()
    log_probs, ref_log_probs, old_log_probs = (x.log_softmax(0) for x in (logits, ref.detach(), old.detach() * 2))
    exact = (log_probs.exp() * (log_probs - ref_log_probs)).sum()
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = (old_log_probs.exp() * corrected_kl(log_probs, old_log_probs, ref_log_probs, kind)).sum()
    close(torch.autograd.grad(estimate, logits, retain_graph=True)[0], gradient, tolerance=1e-10)
    if kind != "k2":
        close(estimate.detach(), exact.detach(), tolerance=1e-10)
    biased = (old_log_probs.exp() * kl_estimate(log_probs, ref_log_probs, kind)).sum()
    assert (torch.autograd.grad(biased, logits, retain_graph=True)[0] - gradient).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_corrected_value_and_gradient(kind, scale):
    """The gradient goes through ratio and estimate; for k2 and kinds with `+`, only through the estimate."""
    rng = random.Random(2)
    for _ in range(10):
        shape = rng.randint(1, 3), rng.randint(1, 4), scale
        new, old, ref = (random_table(rng, *shape) for _ in range(3))
        x, constant = tensor(new).requires_grad_(), kind == "k2" or kind.endswith("+")
        ours = corrected_kl(x, tensor(old), tensor(ref), kind)
        ours.sum().backward()

        def table(at, of, old=old, ref=ref, new=[list(row) for row in new], constant=constant):  # noqa: B006
            return [
                [
                    math.exp((m if constant else n) - o) * reference.kl(n, r, of)
                    for n, m, o, r in zip(*rows, strict=True)
                ]
                for rows in zip(at, new, old, ref, strict=True)
            ]

        close(ours.detach(), table(new, kind.removesuffix("+")))
        of_gradient = "k2" if constant else kind
        close(x.grad, slopes(lambda at, table=table, of=of_gradient: sum(map(sum, table(at, of))), new), SLOPES)


@pytest.mark.parametrize("scale", [1e-7, 1e-5, 1e-3, 1.0, 30.0])
def test_the_metric_has_the_precision_of_its_value(scale):
    """For small log-ratios, a plain exp(-d) - 1 + d has only rounding errors: it is zero or negative."""
    rng = random.Random(3)
    new, ref = (torch.tensor(random_table(rng, 8, 8, scale)) for _ in range(2))
    found = kl_metric(new, ref)
    assert found.min() > 0
    # For small d, use the series, because exp(-d) - 1 + d cancels in float64, too.
    d = (new.double() - ref.double()).clamp(-20, 20)
    expected = torch.where(d.abs() < 1e-2, d**2 / 2 - d**3 / 6 + d**4 / 24 - d**5 / 120, torch.exp(-d) - 1 + d)
    torch.testing.assert_close(found, expected.clamp(max=10), rtol=1e-7, atol=0)


@pytest.mark.parametrize("kind", ["k4", "k2+", ""])
def test_an_unknown_kind_raises_key_error(kind):
    with pytest.raises(KeyError):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), kind)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 64 / 1000)),
        (0.09, 0.5 * (1 - 0.1 * 64 / 1000)),
        (5.0, 0.5 * (1 + 0.2 * 64 / 1000)),
        (-5.0, 0.5 * (1 - 0.2 * 64 / 1000)),
    ],
)
def test_adapted_coefficient(kl, expected):
    assert adapted_coefficient(0.5, kl, samples=64, target=0.1, horizon=1000) == pytest.approx(expected, abs=1e-12)
