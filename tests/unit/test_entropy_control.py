"""The adaptive entropy bonus: a resumed run continues with the same coefficients as an undisturbed run."""

import json
from dataclasses import replace

import pytest

from rlhf.config import ActorConfig, EntropyCtrlConfig
from rlhf.learning.entropy_control import EntropyControl

ADAPTIVE = EntropyCtrlConfig("adaptive", target_entropy=0.5, delta=0.3, min_coeff=0.05, max_coeff=0.9)


def weights(control: EntropyControl, entropies: list[float]) -> list[float]:
    found = []
    for entropy in entropies:
        found.append(control.weight)
        control.observe(entropy)
    return found


@pytest.mark.parametrize("steps", range(6))
def test_a_resumed_controller_continues_with_the_same_coefficients(steps):
    entropies = [0.7, 0.1, 0.5, 0.9, 0.2, 0.8, 0.3, 0.5, 0.1]
    config = ActorConfig(entropy_coeff=0.1, entropy_ctrl=ADAPTIVE)
    whole, begun, resumed = (EntropyControl(config) for _ in range(3))
    expected = weights(whole, entropies)
    begun_weights = weights(begun, entropies[:steps])
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert begun_weights + weights(resumed, entropies[steps:]) == expected
    assert resumed.state_dict() == whole.state_dict()
    assert {0.0, 0.1} <= set(expected), "the run must have both idle and active steps"


def test_the_coefficient_grows_below_the_target_and_is_0_above_it():
    """At the target the coefficient stays the same, and the bonus remains in the loss."""
    control = EntropyControl(ActorConfig(entropy_coeff=0.1, entropy_ctrl=ADAPTIVE))
    found = weights(control, [0.5, 0.7, 0.1, 0.1, 0.1, 0.9, 0.5, 0.5])
    assert found == pytest.approx([0.1, 0.1, 0.0, 0.35, 0.65, 0.9, 0.0, 0.6])


def test_a_changed_entropy_coeff_replaces_the_restored_coefficient():
    control = EntropyControl(ActorConfig(entropy_coeff=0.1, entropy_ctrl=ADAPTIVE))
    weights(control, [0.1, 0.1])
    other = EntropyControl(ActorConfig(entropy_coeff=0.2, entropy_ctrl=ADAPTIVE))
    other.load_state_dict(control.state_dict())
    assert (control.weight, other.weight) == (pytest.approx(0.7), 0.2)


def test_a_fixed_coefficient_or_new_bounds_override_the_restored_coefficient():
    """When the controller is switched off, the coefficient that it had moved must not remain."""
    control = EntropyControl(ActorConfig(entropy_coeff=0.1, entropy_ctrl=ADAPTIVE))
    weights(control, [0.1, 0.1])
    fixed = EntropyControl(ActorConfig(entropy_coeff=0.1))
    fixed.load_state_dict(control.state_dict())
    lower = EntropyControl(ActorConfig(entropy_coeff=0.1, entropy_ctrl=replace(ADAPTIVE, max_coeff=0.5)))
    lower.load_state_dict(control.state_dict())
    assert (control.weight, fixed.weight, lower.weight) == (pytest.approx(0.7), 0.1, 0.5)


def test_a_fixed_coefficient_does_not_change():
    control = EntropyControl(ActorConfig(entropy_coeff=0.1))
    assert not control.is_adaptive
    assert weights(control, [0.0, 9.0, 0.0]) == [0.1] * 3
