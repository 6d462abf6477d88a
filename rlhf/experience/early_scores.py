"""Scores complete groups in a thread while the engine generates the others."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf.data import DrawnPrompt
from rlhf.events import announce
from rlhf.experience.responses import items_of
from rlhf.ranks.status import SCORES, SCORES_EARLY
from rlhf.reward import Reward, RewardItem, RewardResult
from rlhf.rollout import Sample

log = logging.getLogger(__name__)


@dataclass
class _Group:
    """A prompt whose responses are scored as soon as the last of them is complete."""

    drawn: DrawnPrompt
    samples: dict[int, Sample] = field(default_factory=dict)  # complete samples, by number
    items: list[RewardItem] = field(default_factory=list)  # of all samples
    results: list[RewardResult] | None = None
    call: Future | None = None  # the call that scores the group
    error: Exception | None = None  # of the call


class EarlyScores:
    """Scores groups before all groups of a step are complete, so that rewards do not wait for the longest response.

    A score depends only on its sample or its group, so an early score equals a late one. After a timeout or an error,
    the caller scores the group again, because the generation on the same machine may have caused the failure. An error
    of this second call ends the run. The caller's thread decodes texts, because tokenizers are not thread-safe.

    Args:
        size: number of samples of a group.
    """

    def __init__(self, reward: Reward, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self._reward, self._tokenizer, self._size = reward, tokenizer, size
        self._groups: dict[int, _Group] = {}  # by uid
        self._waiting: list[_Group] = []
        self._unlogged: Exception | None = None  # the newest error, whose groups the caller scores again
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="early-scores")

    def log_error(self) -> None:
        """Log the newest error of a call. Call this after the groups were scored again: a second error ends the run."""
        if self._unlogged is not None:
            log.warning("Rewards failed during the generation, but not when computed again: %s", self._unlogged)
            self._unlogged = None

    def expect(self, drawn: Sequence[DrawnPrompt], samples: Sequence[Sequence[Sample]]) -> None:
        """Expect samples of the prompts in `drawn`, and forget all other prompts.

        `samples`: for each prompt in `drawn`, its samples so far, partial samples included.
        """
        with self._lock:
            self._groups = {each.uid: self._groups.get(each.uid) or _Group(each) for each in drawn}
            self._waiting = [group for group in self._waiting if group.drawn.uid in self._groups]
        for of_prompt in samples:
            self.add([sample for sample in of_prompt if sample.finish_reason != "partial"])

    def add(self, samples: Sequence[Sample]) -> None:
        """Record complete samples. Begin to score each group that they complete. Ignore other prompts."""
        for sample in samples:
            self._add(sample)

    def _add(self, sample: Sample) -> None:
        group = self._groups.get(sample.uid)
        if group is None or group.items:
            return
        group.samples[sample.sample] = sample
        if len(group.samples) < self._size:
            return
        samples = [group.samples[number] for number in sorted(group.samples)]
        group.items = items_of(self._tokenizer, [(group.drawn.prompt, samples)])
        with self._lock:
            self._waiting.append(group)
        self._thread.submit(self._score)
        announce(SCORES_EARLY)

    def pop(self, uid: int, samples: Sequence[Sample]) -> list[RewardResult] | None:
        """Return the rewards of a prompt's samples, or None if the caller must compute them. Forget the prompt.

        If a call is computing the rewards now, wait for the call, which ends because each sample has a deadline.
        """
        with self._lock:
            group = self._groups.pop(uid, None)
            if group is None:
                return None
            self._waiting = [each for each in self._waiting if each is not group]
            call = group.call
        if call is not None:
            announce(SCORES)
            call.result()
        self._unlogged = group.error or self._unlogged
        same = len(group.samples) == len(samples) and all(
            np.array_equal(sample.token_ids, group.samples[sample.sample].token_ids) for sample in samples
        )
        return group.results if same else None

    def _score(self) -> None:
        """Score all waiting groups in one call, which keeps all reward processes busy."""
        done: Future = Future()
        with self._lock:
            groups, self._waiting = self._waiting, []
            for group in groups:
                group.call = done
        try:
            results = iter(
                self._reward.score([replace(item, group=i) for i, group in enumerate(groups) for item in group.items])
            )
            for group in groups:
                of_group = [next(results) for _ in group.items]
                if any(result.timeouts for result in of_group):
                    self._reward.pop_timeouts()  # the caller scores again, and counts timeouts then
                else:
                    group.results = of_group
        except Exception as error:
            for group in groups:
                group.error = error
        finally:
            done.set_result(None)
