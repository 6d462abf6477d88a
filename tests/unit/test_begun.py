"""Prompts in flight: saved as tensors in a checkpoint, and loaded from checkpoints of release 0.1."""

from rlhf.data import DrawnPrompt, Prompt
from rlhf.experience.begun import AHEAD, Begun, begun_from_tensors, begun_to_tensors
from rlhf.experience.groups import Group, to_tensors
from rlhf.reward import RewardResult
from rlhf.rollout import Sample

SAMPLES = [
    Sample.of(7, 0, [3, 4], [-0.5, -1.0], "stop", 2),
    Sample.of(7, 1, [5], [-0.25], "length", 2),
]


def prompt(uid: int) -> Prompt:
    return Prompt(uid, [], [uid, 1], "sums", "3", {})


def test_prompts_in_flight_survive_a_round_trip_through_tensors():
    began = Sample.of(7, 0, [3], [-0.5], "partial", 2).extended([4], [-1.0], "partial", 3)
    begun = [Begun(DrawnPrompt(7, prompt(7)), [began, SAMPLES[1], Sample.of(7, 2, [], [], "partial")])]
    (found,) = begun_from_tensors(begun_to_tensors(begun), prompt)
    assert found.samples == begun[0].samples
    assert (found.drawn.uid, found.complete, found.partial_samples, found.oldest(9)) == (7, False, 1, 2)


def test_groups_that_were_generated_ahead_are_complete_prompts_in_flight():
    group = Group(7, [7, 1], SAMPLES, [RewardResult(1.0, {"sums": 1.0})] * 2, [0.0, 0.0], None)
    (found,) = begun_from_tensors(to_tensors([group], AHEAD), prompt)
    assert found.samples == SAMPLES
    assert found.complete
    assert (found.drawn.uid, found.drawn.prompt) == (7, prompt(7))
