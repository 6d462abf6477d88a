"""The reward of every way that `benchmarks.step` compares: something cheap that differs between a group's samples."""


def of_text(text: str) -> float:
    """A number in [0, 1) from the length of a response."""
    return float(len(text) % 7) / 7


def score(solution_str: str, **columns: object) -> float:
    """`of_text`, as this trainer calls a reward."""
    return of_text(solution_str)
