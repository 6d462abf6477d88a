"""The server that ranks of tests are forked from."""

import gc
import sys
from typing import Any

from tests.support.preload import forkserver


def tell(sender: Any) -> None:
    sender.send((gc.get_freeze_count(), len(gc.get_objects()), "torch" in sys.modules))


def test_what_it_has_imported_is_no_matter_of_a_ranks_garbage_collector():
    """A collection would take a quarter of a second, and there are several in each rank."""
    receiver, sender = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=tell, args=(sender,))
    process.start()
    sender.close()
    frozen, left, has_torch = receiver.recv()
    process.join()
    assert has_torch
    assert frozen > 100_000 > left
