"""Calls the user's functions in the supervisor's process, with the metrics of each new step."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlhf.launch.stop_request import StopRequest
from rlhf.tracking.history_follower import HistoryFollower

Callback = Callable[[int, Mapping[str, float]], object]
"""Called with a step and its metrics (docs/tracking.md)."""


class Callbacks:
    """Calls `functions`, in order, for each new record of the metric history, until one of them raises."""

    def __init__(self, functions: Sequence[Callback] = ()) -> None:
        self._functions = functions
        self._follower: HistoryFollower | None = None
        self.error: BaseException | None = None

    def follow(self, history: Path) -> None:
        """Call the functions for records that are appended to `history` from now on."""
        if self._functions:
            self._follower = HistoryFollower(history)

    def look(self, stop: StopRequest) -> None:
        """Call the functions for the new records. If a function raises, store the exception and request a stop."""
        if self._follower is None or self.error is not None:
            return
        try:
            for record in self._follower.new():
                metrics = {name: value for name, value in record.items() if name != "step"}
                for function in self._functions:
                    with stop.interrupting():
                        function(record["step"], metrics)
        except BaseException as error:  # also SystemExit: the ranks must save before this process ends
            self.error = error
            stop.request(f"{type(error).__name__} in a callback")
