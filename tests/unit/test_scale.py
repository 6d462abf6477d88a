"""Messages and indices of many ranks: the figures do not grow with the ranks, or the benchmark reports it."""

import re
import time

import pytest
import torch

from benchmarks import scale, scale_step
from rlhf.ranks.object_codec import decode
from rlhf.storage.layout import step_dir
from rlhf.storage.shards import Shard
from tests.support import thread_ranks
from tests.support.checkpoints import PlainReference, PlainRole, make_checkpointer, make_config
from tests.support.thread_ranks import ThreadTransport, make_coordinator, run_thread_ranks
from tests.support.verified import verify


def test_figures_of_a_small_model_are_flat(capsys):
    assert scale.main(["--model", "tiny", "--ranks", "4", "32"]) == 0
    assert "save, the leader receives: bytes" in capsys.readouterr().out


def test_a_step_of_a_few_simulated_ranks_is_cheap(capsys):
    assert scale.main(["--step", "--model", "tiny", "--ranks", "16"]) == 0
    rows = dict(re.findall(r"│ (\S.*?) +│ +(\S+) +│", capsys.readouterr().out))
    assert int(rows["calls"]) >= 9
    assert int(rows["calls of a save"]) > 9
    assert float(rows["share of the step: %"]) < 1


def test_seconds_of_an_all_gather_grow_with_the_logarithm_of_the_ranks():
    wire = scale_step.Wire(exchange=1.0, broadcast=1.0, message=1.0, byte=0.0)
    assert [wire.seconds(("all_gather", 9, ranks)) for ranks in (2, 1024)] == [2.0, 20.0]
    assert [wire.seconds(("bitwise_or", 9, ranks)) for ranks in (2, 1024)] == [2.0, 2046.0]
    assert scale_step.traffic([("all_gather", 10, 4), ("gather", 10, 4), ("broadcast", 10, 4)]) == (50, 60)


def test_a_figure_that_grows_is_named():
    assert scale.growing({4: {"a: bytes": 1e5, "b: seconds": 1.0}, 8: {"a: bytes": 3e5, "b: seconds": 2.0}}) == [
        "a: bytes"
    ]
    assert scale.growing({4: {"a: bytes": 10.0}, 8: {"a: bytes": 1000.0}}) == []


def test_a_busy_machine_makes_no_figure_grow():
    """On a busy machine, a load that took 22 ms instead of 8 once made the benchmark exit with 1."""
    until = iter([0.05, 0.0, 0.0])

    def busy_once() -> None:
        end = time.process_time() + next(until)
        while time.process_time() < end:
            pass

    assert scale.timed(busy_once, 3)[1] < 0.04


class ManyTensors(PlainRole):
    """A role of many small tensors."""

    def model_shards(self):
        each = torch.zeros(2)
        return {f"tensor number {n}": Shard((8,), (2 * self.rank,), each) for n in range(300)}


def save(rank: int, config) -> None:
    coordinator = make_coordinator()
    role = ManyTensors(8, rank, coordinator.world_size)
    role.rank = rank
    make_checkpointer(config, role, 1, coordinator).save(1)


def test_only_the_leader_receives_the_indices_of_ranks(tmp_path, monkeypatch):
    """Earlier, each rank received the indices of all ranks."""
    received = [0] * 4
    meet = ThreadTransport._meet

    def counted(transport, kind, message, sources):
        messages = meet(transport, kind, message, sources)
        received[transport.rank] += sum(map(len, messages))
        return messages

    monkeypatch.setattr(thread_ranks.ThreadTransport, "_meet", counted)
    config = make_config(tmp_path)
    run_thread_ranks(4, save, config)
    assert received[0] > 4 * 300 * 24
    assert max(received[1:]) < received[0] / 4
    assert received[1:] == pytest.approx([received[1]] * 3, rel=0.2)


def save_twice(rank: int, config) -> None:
    coordinator = make_coordinator()
    role, reference = PlainRole(8, rank, 4), PlainReference(8, rank, 4)
    checkpointer = make_checkpointer(config, role, 1, coordinator, reference=reference)
    RECEIVED[rank].clear()
    for step in (1, 2):
        checkpointer.save(step)


RECEIVED: list[list[tuple[str, bytes]]] = [[] for _ in range(4)]
"""By rank: kind and bytes of each message that the rank has received."""


def test_only_the_leader_receives_sizes_and_linked_files(tmp_path, monkeypatch):
    """Earlier, every rank received the sizes of all ranks, and the entries of all files of a linked reference."""
    meet = ThreadTransport._meet

    def noted(transport, kind, message, sources):
        messages = meet(transport, kind, message, sources)
        RECEIVED[transport.rank] += [(kind, message) for message in messages]
        return messages

    monkeypatch.setattr(thread_ranks.ThreadTransport, "_meet", noted)
    config = make_config(tmp_path)
    run_thread_ranks(4, save_twice, config)
    assert verify(step_dir(config.run_dir, 2)).linked == {"ref/model": "global_step_1"}
    for received in RECEIVED[1:]:
        assert not [decode(message) for kind, message in received if kind == "all_gather"]
        assert not [message for _, message in received if b"xxh3_128" in message]
