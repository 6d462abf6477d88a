"""Pool of reward processes, which can be killed at each sample's deadline: for verifiers that may hang or crash."""

import logging
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf.config.reward import RewardConfig
from rlhf.events import announce
from rlhf.reward.failures import FailurePolicy
from rlhf.reward.scores import RewardError, RewardItem, Score
from rlhf.reward.scoring_handle import ProcessDiedError, ScoringProcess, failure

log = logging.getLogger(__name__)

SENT = ("data_source", "response", "ground_truth", "extra_info")
"""Fields of an item that its process gets; functions don't take the prompt's chat."""


class ProcessPool:
    """Scores items in `num_workers` processes at once, each sample within `timeout_s`."""

    def __init__(self, verifier: str, config: RewardConfig, policy: FailurePolicy, *, forgive_deaths: bool = False):
        """`forgive_deaths`: a sample on which the process dies twice, or reaches a limit, never ends the run."""
        self._verifier = verifier
        self._config = config
        self._policy = policy
        self._forgive_deaths = forgive_deaths
        # Threads as long-lived as the pool: Linux sends the death signal when the *thread* that started a child ends.
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="reward")
        self._idle: queue.LifoQueue[ScoringProcess] = queue.LifoQueue()
        self._processes = [ScoringProcess(verifier, config) for _ in range(config.num_workers)]
        for process in self._processes:
            self._idle.put(process)

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """One score for each item, in order.

        Unless the policy forgives it: RewardError if the function raises or dies twice on one item, UserError if it
        returns no number. Whatever the policy: either of them if the process cannot start.
        """
        scores = []
        for score in self._threads.map(self._score_one, items):
            scores.append(score)
            announce("reward.scored")
        return scores

    def _score_one(self, item: RewardItem) -> Score:
        process = self._idle.get()
        try:
            reply = self._ask(process, item)
        except TimeoutError:
            return self._policy.timed_out([item])[0]
        except ProcessDiedError as error:
            died = RewardError(f"{self._verifier}: the reward process died twice ({error}) on one sample: {item}")
            # What was killed from outside, as when the machine runs out of memory, may live after a restart.
            if process.stopped or (error.killed and not self._forgive_deaths):
                raise died from error
            return self._policy.failed(died, forgive=self._forgive_deaths)
        else:
            if reply.get("limit"):
                process.kill()  # what is left of its memory is not what the next sample would have found
                return self._policy.failed(self._out_of_memory(item), forgive=self._forgive_deaths)
        finally:
            self._idle.put(process)
        wrong = failure(reply, f"\nThe sample: {item}")
        return Score(**reply) if wrong is None else self._policy.failed(wrong)

    def _out_of_memory(self, item: RewardItem) -> RewardError:
        limit = f"reward.memory_gb={self._config.memory_gb:g}" if self._config.memory_gb is not None else "there is"
        return RewardError(f"{self._verifier} asked for more memory than {limit} on one sample: {item}")

    def _ask(self, process: ScoringProcess, item: RewardItem) -> dict[str, Any]:
        request = {name: getattr(item, name) for name in SENT}
        try:
            return process.ask(request)
        except ProcessDiedError as error:
            if process.stopped:
                raise
            log.warning("A reward process died (%s); starting it again for the same sample.", error)
            return process.ask(request)

    def close(self) -> None:
        """End every process, in the middle of a sample if need be."""
        for process in self._processes:
            process.stop()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.kill()
