"""Gives a test's ranks a migration table by which release 0.0.9 had a different schema.

RLHF_EVENT_LISTENER names this module, which imports the listener of `restored_state`, so ranks still record their
final tensors.
"""

import os

from rlhf.config import migrations
from rlhf.config.migrations import Added, Removed, Renamed
from rlhf.events import LISTENER_VARIABLE
from tests.support.restored_state import on_event

__all__ = ["on_event"]

TABLE = {
    "0.1.0": (
        Renamed("actor.learning_rate", "actor.optim.lr"),
        Removed("trainer.speed", 3, "Leave it out: the speed is 3."),
        Added("rollout.min_p", 0.0),
    )
}


VARIABLE = "RLHF_TEST_OLDER_SCHEMA"


def environment() -> dict[str, str]:
    """Return the variables of a start whose ranks have `TABLE`."""
    return {VARIABLE: "1", LISTENER_VARIABLE: f"{__name__}:on_event"}


if VARIABLE in os.environ:
    migrations.MIGRATIONS = TABLE | migrations.MIGRATIONS
