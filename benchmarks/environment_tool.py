"""Environment class of `benchmarks.environments`: a light tool that sleeps and answers in one line."""

import time


class Waiting:
    """Has one tool, which waits for `tool_ms` milliseconds, and rewards the number of calls."""

    def __init__(self, tool_ms: float) -> None:
        self.seconds = tool_ms / 1000

    def reset(self, **row: object) -> str:
        self.calls = 0
        return " Look four times."

    def look(self, at: int) -> str:
        """Look at a place.

        Args:
            at: Number of the place.
        """
        time.sleep(self.seconds)
        self.calls += 1
        return f"Place {at} is empty; {self.calls} places are done."

    def get_reward(self) -> float:
        return float(self.calls)
