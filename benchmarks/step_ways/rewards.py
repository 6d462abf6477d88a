"""Scores responses for every program that `benchmarks.step` compares: cheap, and different within a group."""


def of_text(text: str) -> float:
    """Return a number in [0, 1) from the length of a response."""
    return float(len(text) % 7) / 7


def score(solution_str: str, **columns: object) -> float:
    """Return `of_text` with the signature of this trainer's reward functions."""
    return of_text(solution_str)
