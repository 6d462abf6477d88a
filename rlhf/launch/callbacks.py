"""Calls functions of the user's in the supervisor's process, with the metrics of each new step."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlhf.launch.stop_request import StopRequest
from rlhf.tracking.history_follower import HistoryFollower

Callback = Callable[[int, Mapping[str, float]], object]
"""Called with a step and its metrics (docs/tracking.md)."""


class Callbacks:
    """Calls `functions`, in order, for each record of the metric history.

    If a function raises, no function is called again, and the run is asked to stop.
    """

    def __init__(self, functions: Sequence[Callback] = ()) -> None:
        self._functions = functions
        self._follower: HistoryFollower | None = None
        self.error: BaseException | None = None
        """The exception that a function raised."""

    def follow(self, history: Path) -> None:
        """Call the functions for the records that will be appended to `history`, not for those already in it."""
        if self._functions:
            self._follower = HistoryFollower(history)

    def look(self, stop: StopRequest) -> None:
        """Call the functions for the new records. Never raises: an exception goes to `error`, and `stop` is asked."""
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
            stop.ask(f"{type(error).__name__} in a callback")
