"""Defines a prompt in flight, whose responses later steps continue, and encodes such prompts for checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data import DrawnPrompt, Prompt
from rlhf.experience.groups import from_tensors
from rlhf.rollout import Sample
from rlhf.rollout.sample_codec import from_arrays, to_arrays

PREFIX, AHEAD = "begun.", "ahead."
"""Prefixes of the tensors of samples in flight, and of the scored groups that release 0.1 generated a step ahead."""


@dataclass(frozen=True)
class Begun:
    """A prompt in flight with its samples so far: complete, partial, or without a token."""

    drawn: DrawnPrompt
    samples: list[Sample]

    @property
    def complete(self) -> bool:
        return all(sample.finish_reason != "partial" for sample in self.samples)

    @property
    def partial_samples(self) -> int:
        """Number of unfinished samples that have tokens."""
        return sum(sample.finish_reason == "partial" and len(sample) > 0 for sample in self.samples)

    def oldest(self, version: int) -> int:
        """Return the version of the oldest token, or `version` without tokens."""
        return min((sample.version for sample in self.samples if len(sample)), default=version)


def replaced(begun: Sequence[Begun], newer: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each prompt. A sample in `newer` replaces the older sample of the same uid and number."""
    new = {(sample.uid, sample.sample): sample for sample in newer}
    return [[new.get((s.uid, s.sample), s) for s in each.samples] for each in begun]


def begun_to_tensors(begun: Sequence[Begun]) -> dict[str, Tensor]:
    if not begun:
        return {}
    arrays = to_arrays([sample for each in begun for sample in each.samples])
    return {f"{PREFIX}{name}": torch.from_numpy(array) for name, array in arrays.items()}


def begun_from_tensors(part: Mapping[str, Tensor], prompt: Callable[[int], Prompt]) -> list[Begun]:
    """Return the prompts in flight from the tensors of a rank. `prompt` returns the prompt of a uid.

    The result includes the samples that release 0.1 generated a step ahead, without their rewards.
    """
    of_prompt: dict[int, list[Sample]] = {}
    if f"{PREFIX}rows" in part:
        named = {name.removeprefix(PREFIX): t.numpy() for name, t in part.items() if name.startswith(PREFIX)}
        for sample in from_arrays(named):
            of_prompt.setdefault(sample.uid, []).append(sample)
    of_prompt |= {group.uid: group.samples for group in from_tensors(part, AHEAD)}
    return [Begun(DrawnPrompt(uid, prompt(uid)), samples) for uid, samples in of_prompt.items()]
