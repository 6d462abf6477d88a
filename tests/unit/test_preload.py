"""The server that ranks of tests are forked from."""

import gc
import sys
from typing import Any

from transformers import conversion_mapping

from rlhf.config.resolved import schema
from tests.support.preload import forkserver


def send_counts(sender: Any) -> None:
    sender.send((gc.get_freeze_count(), len(gc.get_objects()), "torch" in sys.modules))


def test_imports_of_the_fork_server_are_frozen_for_garbage_collection():
    """Each rank runs several collections. Each would take a quarter of a second if it visited the imports."""
    receiver, sender = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=send_counts, args=(sender,))
    process.start()
    sender.close()
    frozen, left, has_torch = receiver.recv()
    process.join()
    assert has_torch
    assert frozen > 100_000 > left


def send_what_is_made(sender: Any) -> None:
    sender.send((conversion_mapping._checkpoint_conversion_mapping_cache is not None, schema.cache_info().currsize))


def test_shared_tables_are_built_before_ranks_are_forked():
    """Making transformers' mappings of weights and the schema is a sixth of a rank's work before its first step."""
    receiver, sender = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=send_what_is_made, args=(sender,))
    process.start()
    sender.close()
    assert receiver.recv() == (True, 1)
    process.join()
