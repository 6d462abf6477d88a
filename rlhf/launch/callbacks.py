"""Functions of the caller's, called in the supervisor's process with each new record of the run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlhf.launch.stop_request import StopRequest
from rlhf.tracking.history_follower import HistoryFollower

Callback = Callable[[int, Mapping[str, float]], object]
"""Called with a step and its metrics (docs/tracking.md)."""


class Callbacks:
    """Calls `functions`, in order, for each record; the first that raises is the last, and asks the run to stop."""

    def __init__(self, functions: Sequence[Callback] = ()) -> None:
        self._functions = functions
        self._follower: HistoryFollower | None = None
        self.error: BaseException | None = None
        """What a function raised."""

    def follow(self, history: Path) -> None:
        """Begin with the records that this file has not got yet."""
        if self._functions:
            self._follower = HistoryFollower(history)

    def look(self, stop: StopRequest) -> None:
        """Hand on what is new. Does not raise: `error` has it, and `stop` is asked."""
        if self._follower is None or self.error is not None:
            return
        try:
            for record in self._follower.new():
                metrics = {name: value for name, value in record.items() if name != "step"}
                for function in self._functions:
                    with stop.interrupting():
                        function(record["step"], metrics)
        except BaseException as error:  # SystemExit as well: the ranks save first
            self.error = error
            stop.ask(f"{type(error).__name__} in a callback")
