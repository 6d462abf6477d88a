"""Copies of a snapshot's tensors: equal, separate from the live tensors, and in memory that the next save reuses."""

import mmap
from functools import partial

import torch

from rlhf.checkpoint.save.snapshot import take_snapshot
from rlhf.checkpoint.save.staging import ALIGNMENT, Stager
from rlhf.checkpoint.state.run_state import RunState
from rlhf.storage.shards import Shard
from tests.support.checkpoints import PlainReference, PlainRole, equal_bits, make_driver
from tests.support.page_locks import stand_in
from tests.support.refusals import says, user_error


def snapshot_of(size: int):
    """One rank's part of a save, with shards of other types than float32, a scalar and a tensor that another
    rank writes."""
    role, reference = PlainRole(size), PlainReference(size)
    snapshot = take_snapshot(
        1, ["model", "optimizer"], RunState({"actor": role}, make_driver(), reference=reference), "", 0
    )
    snapshot.components["critic/model"] = {
        "odd": Shard((7,), (0,), torch.arange(7, dtype=torch.uint8)),
        "half": Shard((size,), (0,), torch.randn(size).bfloat16()),
        "steps": Shard((), (0,), torch.tensor(5.0)),
        "empty": Shard((0, 4), (0,), torch.empty(0, 4)),
        "elsewhere": Shard((size,), (0,), role.weight, saved_here=False),
    }
    return snapshot


def addresses(snapshot) -> dict[str, int]:
    """Return the address of each tensor that the rank writes."""
    found = {}
    for folder, component in snapshot.components.items():
        written = {name: shard.local for name, shard in component.items() if shard.saved_here and shard.local.numel()}
        found |= {f"{folder}/{name}": tensor.data_ptr() for name, tensor in written.items()}
    return found


def test_staged_copies_reuse_the_memory_of_the_previous_save():
    stager, first = Stager(), None
    for _ in range(3):
        live = snapshot_of(1000)
        staged = stager.copy(live, linked=("ref/model",))
        for folder, component in live.components.items():
            for name, shard in component.items():
                copy = staged.components[folder][name]
                assert (copy.shape, copy.offsets, copy.saved_here) == (shard.shape, shard.offsets, shard.saved_here)
                assert equal_bits(copy.local, shard.local)
        own = {name for name, address in addresses(staged).items() if address != addresses(live)[name]}
        # A linked component is not written, so it is not copied.
        assert own == addresses(live).keys() - {"ref/model/weight"}
        elsewhere = [snapshot.components["critic/model"]["elsewhere"].local.data_ptr() for snapshot in (live, staged)]
        assert elsewhere[0] == elsewhere[1]
        assert all(addresses(staged)[name] % ALIGNMENT == 0 for name in own)
        here = {name: addresses(staged)[name] for name in own}
        first = first or here
        assert here == first
    # A save that needs more memory enlarges the memory once, and smaller saves reuse it.
    large, small_again, large_again = (stager.copy(snapshot_of(size)) for size in (5000, 1000, 5000))
    assert addresses(large) == addresses(large_again)
    assert addresses(small_again)["actor/model/weight"] == addresses(large)["actor/model/weight"]


def test_page_locked_memory_has_the_size_that_the_plan_counts(monkeypatch):
    locks, stager, page = stand_in(monkeypatch), Stager(), mmap.PAGESIZE
    for nbytes in (5 * page + 1, 2 * page, 6 * page, 9 * page):  # not powers of two; the second needs no more memory
        stager._reserve(nbytes, pinned=True)
        memory = stager._memory[True]
        assert memory.nbytes >= nbytes
        assert memory.data_ptr() % page == 0
        # The memory of earlier saves is no longer locked.
        assert locks.spans == {memory.data_ptr(): -(-memory.nbytes // page) * page}
    locks.failure = 2
    message = user_error(partial(stager._reserve, pinned=True), 10 * page)
    says(message, "no memory", "checkpoint.async_save=false")
    assert not locks.spans
