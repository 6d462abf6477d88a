"""Names how a command's training ends, for trackers that show a status."""

from typing import Literal

Outcome = Literal["finished", "stopped", "failed"]
"""`finished`: the last step is done. `stopped`: the run saved and left on request. `failed`: an error ended the run."""
