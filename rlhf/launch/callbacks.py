"""Calls the user's functions in the supervisor's process, with the metrics of each new step."""

import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.config import TrainerConfig
from rlhf.config.user_functions import load_function
from rlhf.errors import UserError
from rlhf.launch.stop_request import StopRequest
from rlhf.ranks.next_start import changes_to_continue
from rlhf.tracking.history_follower import HistoryFollower

Callback = Callable[[int, Mapping[str, float]], object]
"""Called with a step and its metrics (docs/tracking.md)."""


def load_callbacks(trainer: TrainerConfig) -> list[Callback]:
    """Run the files of `trainer.callbacks`, and return their functions, wrapped to raise all errors as UserError."""
    changes = changes_to_continue(trainer)
    return [_loaded(spec, trainer.callback_kwargs, changes) for spec in trainer.callbacks]


def _loaded(spec: str, kwargs: Mapping[str, Any], changes: str) -> Callback:
    function = load_function("trainer.callbacks", spec)
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    own = {name: value for name, value in kwargs.items() if takes_all or name in names}

    def callback(step: int, metrics: Mapping[str, float]) -> None:
        directory = os.open(".", os.O_RDONLY)
        try:
            function(step, metrics, **own)
        except (Exception, SystemExit) as error:
            # Drop this frame, so that the traceback begins with the user's frame.
            theirs = error.__traceback__ and error.__traceback__.tb_next
            lines = "".join(traceback.format_exception(type(error), error, theirs)).rstrip()
            raise UserError(
                f"trainer.callbacks={spec} raised an error at step {step}, so the run saved and ended. The same "
                f"command{changes} continues it.\n{lines}"
            ) from error
        finally:
            os.fchdir(directory)  # undo a chdir of the function: restarted ranks resolve relative paths in settings
            os.close(directory)

    return callback


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
        except BaseException as error:  # catch SystemExit, too: the ranks must save before this process ends
            self.error = error
            stop.request(f"{type(error).__name__} in a callback")
