"""Scores samples in a pool of reward processes and kills a process at its sample's deadline."""

import logging
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from rlhf.config.schema.reward import RewardConfig
from rlhf.events import announce
from rlhf.reward.failures import FailurePolicy
from rlhf.reward.request_format import RequestFormat
from rlhf.reward.scores import RewardError, RewardItem, Score
from rlhf.reward.scoring_handle import ProcessDiedError, ScoringProcess, failure

log = logging.getLogger(__name__)
ANNOUNCE_S = 20.0
"""Seconds after which a progress event announces a slow sample."""


class ProcessPool:
    """Scores items in `num_workers` concurrent processes, each sample within `timeout_s`."""

    def __init__(self, verifier: str, config: RewardConfig, policy: FailurePolicy, *, forgive_deaths: bool = False):
        """`forgive_deaths`: a sample whose verifier fails, reaches a limit or dies twice does not end the run."""
        self._verifier = verifier
        self._config = config
        self._policy = policy
        self._forgive_deaths = forgive_deaths
        # The threads live as long as the pool: Linux sends the death signal when the *thread* that forked a child ends.
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="reward")
        self._idle: queue.LifoQueue[ScoringProcess] = queue.LifoQueue()
        self._processes = [ScoringProcess(verifier, config) for _ in range(config.num_workers)]
        for process in self._processes:
            self._idle.put(process)

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """Return one score for each item, in order.

        Raises:
            UserError: the function failed on a sample, and `reward.on_error=stop`; or the start of a process raised
                UserError.
            RewardError: a process cannot start for another reason, was stopped by `close`, or was killed twice on one
                sample (unless `forgive_deaths`).
        """
        if not items:
            return []
        scores: list[Score] = []
        parts = self._threads.submit(self._request_format).result().split(items, len(self._processes))
        futures = [self._threads.submit(self._score_together, part) for part in parts]
        try:
            for future in futures:
                # Each request has a deadline, so the loop ends. The wait may exceed the watchdog's deadline, so
                # announce an event.
                while not wait([future], ANNOUNCE_S).done:
                    announce("reward.wait")
                scores += future.result()
                for _ in future.result():
                    announce("reward.scored")
        finally:
            for future in futures:
                future.cancel()
        return scores

    def _request_format(self) -> RequestFormat:
        process = self._idle.get()
        try:
            return process.start()
        finally:
            self._idle.put(process)

    def _score_together(self, items: Sequence[RewardItem]) -> list[Score]:
        process = self._idle.get()
        try:
            entries = self._request(process, items)
        except TimeoutError:
            return self._policy.timed_out(items)
        except ProcessDiedError as error:
            died = RewardError(f"{self._verifier}: the reward process died twice ({error}) on {_describe(items)}")
            # If something else killed the process, for example the kernel when memory ran out, a restart of the run may
            # succeed.
            if process.stopped or (error.killed and not self._forgive_deaths):
                raise died from error
            return [self._policy.failed(died, forgive=self._forgive_deaths)] * len(items)
        else:
            if any(entry.get("limit") or (self._forgive_deaths and "error" in entry) for entry in entries):
                process.kill()  # the process's memory or files may differ from a new process's
            # `request` repeats an error of the whole request for each item.
            whole = len({id(entry) for entry in entries}) < len(entries)
            return [self._score(entry, items if whole else [item]) for entry, item in zip(entries, items, strict=True)]
        finally:
            self._idle.put(process)

    def _score(self, entry: dict[str, Any], items: Sequence[RewardItem]) -> Score:
        """Return the score of one item. `items` are the request's items if `entry` is one error for all."""
        if entry.get("limit"):
            limit = self._config.memory_gb
            shown = "the machine has" if limit is None else f"reward.memory_gb={limit:g}"
            error = RewardError(f"{self._verifier} needed more memory than {shown} on {_describe(items)}")
            return self._policy.failed(error, forgive=self._forgive_deaths)
        if (wrong := failure(entry, f"\nOn {_describe(items)}")) is not None:
            return self._policy.failed(wrong, forgive=self._forgive_deaths)
        return self._policy.timed_out(items)[0] if entry["timed_out"] else Score(**entry)

    def _request(self, process: ScoringProcess, items: Sequence[RewardItem]) -> list[dict[str, Any]]:
        try:
            return process.request(items)
        except ProcessDiedError as error:
            if process.stopped:
                raise
            log.warning("A reward process died (%s); starting it again for the same sample.", error)
            return process.request(items)

    def close(self) -> None:
        """End every process, even in the middle of a sample."""
        for process in self._processes:
            process.stop()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.kill()


def _describe(items: Sequence[RewardItem]) -> str:
    return f"one sample: {items[0]}" if len(items) == 1 else f"{len(items)} samples, the first of them: {items[0]}"
