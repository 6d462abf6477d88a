"""Dynamic sampling fills a batch only with groups that have a score."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rlhf.config import FilterGroupsConfig
from rlhf.experience.dynamic_sampling import DynamicSampling
from rlhf.experience.groups import Group
from rlhf.experience.metrics import RolloutStats
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from tests.support.refusals import says, user_error


def group(uid: int, *reasons: Any) -> Group:
    samples = [Sample.of(uid, i, [7], [-0.5], reason, 0) for i, reason in enumerate(reasons)]
    results = [RewardResult(1.0, {"sums": 1.0}) for _ in reasons]
    return Group(uid, [3], samples, results, [0.0] * len(reasons), None)


def filled(made: Sequence[Group]) -> list[int]:
    """Return the uids of a batch of 2 prompts that one generation of `made` fills."""
    coordinator = Coordinator(GlooTransport())
    source: Any = SimpleNamespace(
        prompts=SimpleNamespace(batch_size=2),
        generation=SimpleNamespace(coordinator=coordinator),
        groups=lambda size, stats, step: list(made),
    )
    config = FilterGroupsConfig(enable=True, max_num_gen_batches=1, on_limit="fill")
    groups, _ = DynamicSampling(config, len(made), 1, source).sample(1, RolloutStats())
    return [each.uid for each in groups]


def test_only_groups_with_a_score_fill_a_batch():
    """A batch of failed groups has no reward: the step ended with a KeyError, again after each restart."""
    lost = [group(uid, "failed", "failed") for uid in (2, 3)]
    assert filled([group(0, "stop", "stop"), group(1, "failed", "stop"), *lost]) == [0, 1]


def test_too_few_groups_with_a_score_are_an_error():
    lost = [group(uid, "failed", "failed") for uid in (1, 2)]
    error = user_error(filled, [group(0, "stop", "stop"), *lost])
    says(error, "With the 1 prompts without signal", "too few prompts", "environments", "failed")
