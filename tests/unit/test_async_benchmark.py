"""Tests the simulations of asynchronous schedules: no sample is lost or generated twice, and no token is too old."""

import pytest

from benchmarks.async_peers import OFF_POLICY, PrimeRL, Verl, run_peer
from benchmarks.async_run import GROUP, Measured, Workload, run
from benchmarks.rollout_service import lengths


def small() -> Workload:
    return Workload(lengths("bimodal", seed=3), servers=2, slots=4, groups=4, warmup=2, steps=4)


def check_trained(found: Measured, work: Workload) -> None:
    """Check that whole groups are trained on, each once, and that measured tokens match the samples' lengths."""
    assert len(found.trained) == len(set(found.trained)) == (work.warmup + work.steps) * work.groups * GROUP
    uids = [uid for uid, _ in found.trained]
    assert all(uids.count(uid) == GROUP for uid in uids)
    measured = found.trained[work.warmup * work.groups * GROUP :]
    assert sum(found.ages.values()) == sum(work.length(*each) for each in measured)


@pytest.mark.parametrize("training_s", [1.0, 60.0])
@pytest.mark.parametrize("async_steps", [0, 1, 2])
def test_every_sample_is_generated_once_and_no_older_than_async_steps(async_steps, training_s):
    work = small()
    found = run(work, async_steps, training_s)
    check_trained(found, work)
    assert found.age_max <= async_steps
    kept = sum(work.length(*each) for each in found.trained) + found.left_over
    # An abort loses the token being decoded. A sample that moves to another server may lose tokens that it already has.
    assert kept - 0.01 < found.decoded < 1.02 * kept
    assert run(small(), async_steps, training_s) == found


@pytest.mark.parametrize("policy", [Verl, PrimeRL])
def test_other_schedules_generate_every_sample_once(policy):
    work = small()
    found = run_peer(policy, work, training_s=10.0)
    check_trained(found, work)
    assert 0 < found.age_max <= OFF_POLICY


def test_steps_that_do_not_wait_are_as_fast_as_the_training():
    work = small()
    training_s = run(work, 0, training_s=0.0).seconds
    assert 1.02 * training_s > run(work, 2, training_s).seconds > training_s


def test_a_deeper_pipeline_adds_less_than_half_a_step_to_the_age_of_tokens():
    """Tokens are a step old if generation and training overlap. A deeper pipeline adds the reserve alone."""
    training_s = run(small(), 0, training_s=0.0).seconds
    one, two, four = (run(small(), k, training_s) for k in (1, 2, 4))
    assert one.age_mean <= 1 < two.age_mean < 1.5
    assert four.age_mean < 1.5
    assert max(two.seconds, four.seconds) < 1.02 * training_s


def test_a_larger_max_staleness_waits_less_for_long_responses():
    bounded, wide = (run(small(), 1, 1.0, max_staleness) for max_staleness in (None, 3))
    check_trained(wide, small())
    assert bounded.age_max == 1 < wide.age_max <= 3
    assert wide.live > bounded.live
