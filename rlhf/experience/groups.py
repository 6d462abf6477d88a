"""Groups the samples of a prompt with their rewards, and encodes carried groups as tensors for checkpoints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from rlhf.experience.groups_format_7 import from_format_7
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from rlhf.rollout.sample import SampleRow
from rlhf.rollout.sample_codec import from_arrays, joined, split, to_arrays


@dataclass(frozen=True)
class Group:
    """The scored samples of one prompt."""

    uid: int
    """Position of the prompt in the stream of prompts."""
    prompt_ids: list[int]
    samples: list[Sample]
    results: list[RewardResult]
    """Each sample's reward."""
    penalties: list[float]
    """Each sample's over-long penalty, at most 0."""
    baseline: float | None
    """The greedy response's total reward; None if the estimator uses no greedy baseline."""

    @property
    def rows(self) -> list[SampleRow]:
        """The sequences that the model reads in training, one per row of each sample."""
        return [row for sample in self.samples for row in sample.rows(self.prompt_ids)]

    @property
    def version(self) -> int:
        """Training steps of the policy that drew the group's oldest token."""
        return min(sample.version for sample in self.samples)

    @property
    def scores(self) -> list[float]:
        """The total reward of each sample: its reward plus its over-long penalty."""
        return [result.score + penalty for result, penalty in zip(self.results, self.penalties, strict=True)]

    @property
    def has_score(self) -> list[bool]:
        """Whether each sample has a score: False for samples whose environment failed."""
        return [sample.finish_reason != "failed" for sample in self.samples]

    def has_signal(self, metric: str) -> bool:
        """Return whether the samples differ in `metric`.

        `acc` is the first reward function's score, `seq_reward` the total reward (`algorithm.filter_groups.metric`).
        Failed samples do not count.
        """
        if metric == "seq_reward":
            return len({score for score, counts in zip(self.scores, self.has_score, strict=True) if counts}) > 1
        results = [result for result, counts in zip(self.results, self.has_score, strict=True) if counts]
        return len({next(iter(result.terms.values())) for result in results}) > 1


def uids_everywhere(groups: Sequence[Group], coordinator: Coordinator) -> list[int]:
    """Return the uids of the `groups` of all ranks, ascending. Collective."""
    return sorted(uid for of_rank in coordinator.all_gather([group.uid for group in groups]) for uid in of_rank)


def to_tensors(groups: Sequence[Group], prefix: str = "") -> dict[str, Tensor]:
    """Encode `groups` losslessly as 1-D tensors whose names begin with `prefix`. Return {} without groups.

    The tensors are the samples' arrays (`rollout.sample_codec`), the concatenated prompt token ids (int32), and all
    other fields as bytes of JSON (uint8).
    """
    if not groups:
        return {}
    records = [
        {
            "uid": group.uid,
            "baseline": group.baseline,
            "penalties": group.penalties,
            "prompt_length": len(group.prompt_ids),
            # Python's JSON round-trips float64 exactly.
            "results": [asdict(result) for result in group.results],
        }
        for group in groups
    ]
    arrays = to_arrays([sample for group in groups for sample in group.samples])
    arrays["prompt_ids"] = joined([np.array(group.prompt_ids, "<i4") for group in groups], "<i4")
    arrays["records"] = np.frombuffer(bytearray(json.dumps(records).encode()), "u1")
    return {f"{prefix}{name}": torch.from_numpy(array) for name, array in arrays.items()}


def from_tensors(tensors: Mapping[str, Tensor], prefix: str = "") -> list[Group]:
    """Return the groups that `to_tensors` encoded with the same `prefix`, or that format 7 stored.

    Raises:
        ValueError: the tensors' lengths contradict each other.
    """
    if f"{prefix}records" not in tensors:
        return []
    names = [name for name in tensors if name.startswith(prefix)]
    arrays = {name.removeprefix(prefix): tensors[name].numpy() for name in names}
    if "prompt_ids" not in arrays:  # format 7, in which `token_ids` include the prompts
        arrays = from_format_7(arrays)
    records = json.loads(arrays["records"].tobytes())
    all_samples, groups = from_arrays(arrays), []
    lengths = [record["prompt_length"] for record in records]
    found = len(arrays["prompt_ids"]), len(all_samples)
    if (sum(lengths), sum(len(record["results"]) for record in records)) != found:
        raise ValueError(
            f"records and tensors of groups contradict each other: the tensors have {found[0]} prompt tokens and "
            f"{found[1]} samples"
        )
    samples, prompts = iter(all_samples), split(arrays["prompt_ids"], lengths)
    for record, prompt_ids in zip(records, prompts, strict=True):
        results = [RewardResult(**result) for result in record["results"]]
        of_prompt = list(islice(samples, len(results)))
        groups.append(
            Group(record["uid"], prompt_ids.tolist(), of_prompt, results, record["penalties"], record["baseline"])
        )
    return groups
