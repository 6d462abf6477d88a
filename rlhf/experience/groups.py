"""Groups: a prompt's samples with their rewards, and the tensors as which they lie in a checkpoint until their step."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import torch
from torch import Tensor

from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import RewardResult
from rlhf.rollout import Sample, as_spans

OF_SAMPLES = ("response_lengths", "finish_reasons", "versions", "observations")
"""Fields of a record that are lists with an entry for each sample."""


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, scored."""

    uid: int
    """The prompt's place in the stream."""
    prompt_ids: list[int]
    samples: list[Sample]
    results: list[RewardResult]
    """Each sample's reward."""
    penalties: list[float]
    """Each sample's over-long punishment, which adds to its reward: 0 or less."""
    baseline: float | None
    """The whole reward of the greedy response; None when the estimator asks for none."""

    @property
    def version(self) -> int:
        """Steps that the policy had done when it sampled; of several the least."""
        return min(sample.version for sample in self.samples)

    @property
    def scores(self) -> list[float]:
        """The whole reward of each sample."""
        return [result.score + penalty for result, penalty in zip(self.results, self.penalties, strict=True)]

    def has_signal(self, metric: str) -> bool:
        """Whether the samples differ in `metric` of `algorithm.filter_groups`.

        That is `acc` (the first reward's own score) or `seq_reward` (the whole reward).
        """
        if metric == "seq_reward":
            return len(set(self.scores)) > 1
        return len({next(iter(result.terms.values())) for result in self.results}) > 1


def uids_everywhere(groups: Sequence[Group], coordinator: Coordinator) -> list[int]:
    """The uids of all ranks' `groups`, ascending. Collective."""
    return sorted(uid for of_rank in coordinator.gather([group.uid for group in groups]) for uid in of_rank)


def to_tensors(groups: Sequence[Group], prefix: str = "") -> dict[str, Tensor]:
    """`groups` without loss: token ids and log-probs as flat tensors, all else as JSON bytes. No groups are no tensors.

    The tensors' names begin with `prefix`.
    """
    if not groups:
        return {}
    records = [
        {
            "uid": group.uid,
            "baseline": group.baseline,
            "penalties": group.penalties,
            "prompt_length": len(group.prompt_ids),
            "response_lengths": [len(s.token_ids) for s in group.samples],
            "finish_reasons": [s.finish_reason for s in group.samples],
            "versions": [s.version for s in group.samples],
            "observations": [s.observations for s in group.samples],
            "results": [asdict(result) for result in group.results],
        }
        for group in groups
    ]
    token_ids = [token for g in groups for ids in (g.prompt_ids, *(s.token_ids for s in g.samples)) for token in ids]
    log_probs = [log_prob for group in groups for sample in group.samples for log_prob in sample.log_probs]
    return {
        f"{prefix}token_ids": torch.tensor(token_ids, dtype=torch.int64),
        # Python's floats are float64, and so is what its JSON writes and reads: nothing is rounded.
        f"{prefix}log_probs": torch.tensor(log_probs, dtype=torch.float64),
        f"{prefix}records": torch.tensor(list(json.dumps(records).encode()), dtype=torch.uint8),
    }


def from_tensors(tensors: dict[str, Tensor], prefix: str = "") -> list[Group]:
    """The groups that `to_tensors` was given; tensors with other names do not matter."""
    if f"{prefix}records" not in tensors:
        return []
    token_ids, log_probs = (iter(tensors[f"{prefix}{name}"].tolist()) for name in ("token_ids", "log_probs"))
    groups = []
    for record in json.loads(bytes(tensors[f"{prefix}records"].tolist())):
        uid, prompt_ids = record["uid"], list(islice(token_ids, record["prompt_length"]))
        samples = [
            Sample(
                uid,
                number,
                list(islice(token_ids, length)),
                list(islice(log_probs, length)),
                reason,
                version,
                as_spans(spans),
            )
            for number, (length, reason, version, spans) in enumerate(
                zip(*(record[name] for name in OF_SAMPLES), strict=True)
            )
        ]
        results = [RewardResult(**result) for result in record["results"]]
        groups.append(Group(uid, prompt_ids, samples, results, record["penalties"], record["baseline"]))
    return groups
