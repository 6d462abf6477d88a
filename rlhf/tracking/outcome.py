"""Names how a command's training ends, for trackers that show a status."""

from typing import Literal

Outcome = Literal["finished", "stopped", "failed"]
"""The last step is done; the run saved and left on request; or an error ended it."""
