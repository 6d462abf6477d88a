"""Provides reward functions that run in reward processes."""

import asyncio
import time
from collections.abc import Callable


def nearness(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Return the fraction of right leading characters, after a pause in which a kill can strike."""
    time.sleep(0.002)
    right = sum(a == b for a, b in zip(solution_str, str(ground_truth), strict=False))
    return right / max(1, len(str(ground_truth)))


async def others(prompts: list, completions: list, ground_truth: list, log_extra: Callable, **columns: list) -> list:
    """Return for each sample the fraction of its prompt's samples that differ (TRL's signature), after a pause."""
    await asyncio.sleep(0.002 * len(completions))
    texts = [completion[0]["content"] for completion in completions]
    log_extra("beside", [sorted(set(texts) - {text}) for text in texts])
    return [1 - texts.count(text) / len(texts) for text in texts]
