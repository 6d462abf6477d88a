"""Reward function of a file, which runs in processes of its own."""

import time


def nearness(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Share of the leading characters that are right, after a while that a kill can hit."""
    time.sleep(0.002)
    right = sum(a == b for a, b in zip(solution_str, str(ground_truth), strict=False))
    return right / max(1, len(str(ground_truth)))
