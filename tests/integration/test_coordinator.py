"""The coordinator's calls exchange the same objects and errors over gloo between processes and in memory between
threads."""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf import events
from rlhf.ranks.coordinator import Coordinator, PeerError
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.transport import LostPeer
from tests.support.checkpoints import run_ranks
from tests.support.thread_ranks import die, make_coordinator, messages, replaced, run_thread_ranks, subscribe, this_rank

DEADLINE_S = 60
Start = Callable[..., list[Any]]


@pytest.fixture(params=["gloo", "threads"])
def start(request, tmp_path) -> Start:
    """A function that starts ranks and returns their results."""
    if request.param == "threads":
        return lambda *arguments: run_thread_ranks(*arguments, deadline_s=DEADLINE_S)
    return lambda *arguments: run_ranks(*arguments, deadline_s=DEADLINE_S, join=tmp_path / "join")


class UnsendableError(Exception):
    """An error whose `args` do not fit its constructor, so that a receiver cannot build it again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def outcome(action: Callable[[], Any]) -> Any:
    """Return the result of `action`, or the texts of its error and the causes."""
    try:
        return action()
    except Exception as error:
        texts, cause = [], error
        while cause is not None:
            texts.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__
        return texts


def fail(error: Exception) -> Any:
    raise error


def all_calls(rank: int, domains: list[int]) -> dict[str, Any]:
    coordinator = make_coordinator()
    coordinator.domains = domains
    other = coordinator.duplicate(timedelta(seconds=20))
    ran: list[str] = []
    found: dict[str, Any] = {
        "own": (coordinator.rank, coordinator.world_size, coordinator.is_leader),
        "domains": (coordinator.domain, coordinator.domain_leaders, coordinator.leads_domain, other.domains),
        "all_gather": coordinator.all_gather({"rank": rank, "bytes": bytes(range(rank))}),
        "broadcast": [coordinator.broadcast(f"of {rank}", source) for source in range(coordinator.world_size)],
        "send_object": [coordinator._transport.send_object(f"of {source}", source, [0, 2]) for source in (0, 2)],
        "collect": coordinator.collect(lambda: f"of {rank}"),
        "send_to_domain_leaders": coordinator.send_to_domain_leaders(lambda: f"from {rank}"),
        "on_leader": coordinator.on_leader(lambda: ran.append("leader") or rank),
        "on_rank": coordinator.on_rank(1, lambda: ran.append("rank 1") or rank),
        "on_domain_leaders": coordinator.on_domain_leaders(lambda: ran.append("domain") or rank),
        "everywhere": coordinator.everywhere(lambda: ran.append("everywhere") or rank),
        "other": other.everywhere(lambda: -rank),
        "wrong on the leader": outcome(lambda: coordinator.on_leader(lambda: fail(ValueError(rank)))),
        "wrong on rank 1": outcome(lambda: coordinator.on_rank(1, lambda: fail(OSError(28, "full", f"file {rank}")))),
        "wrong on rank 2": outcome(lambda: coordinator.everywhere(lambda: fail(KeyError(rank)) if rank == 2 else rank)),
        "wrong collected": outcome(lambda: coordinator.collect(lambda: fail(KeyError(rank)) if rank == 2 else rank)),
        "wrong for leaders": outcome(lambda: coordinator.send_to_domain_leaders(lambda: fail(ValueError(rank)))),
        "wrong everywhere": outcome(lambda: coordinator.everywhere(lambda: fail(ValueError(rank)))),
        "unsendable": outcome(lambda: coordinator.on_leader(lambda: fail(UnsendableError(1, rank)))),
        "after them": coordinator.all_gather(rank),
    }
    # Each rank receives a copy, so no rank can change another rank's object.
    mine = [rank]
    everyones = coordinator.all_gather(mine)
    for received in everyones:
        received.append("changed")
    found["a copy"] = mine, coordinator.broadcast(mine, 1) is mine
    # A block passes through all ranks.
    block = torch.full((5,), rank, dtype=torch.uint8)
    following, previous = (rank + 1) % coordinator.world_size, (rank - 1) % coordinator.world_size
    if rank == 0:
        coordinator.send(block, following)
        coordinator.receive(block, previous)
    else:
        received = torch.empty_like(block)
        coordinator.receive(received, previous)
        coordinator.send(received + block, following)
    return found | {"ran": ran, "block": block}


def expected(rank: int, domains: list[int]) -> dict[str, Any]:
    leaders = sorted(set(domains))
    ran = ["leader"] * (rank == 0) + ["rank 1"] * (rank == 1) + ["domain"] * (rank in leaders) + ["everywhere"]
    return {
        "own": (rank, 3, rank == 0),
        "domains": (domains[rank], leaders, rank in leaders, domains),
        "broadcast": ["of 0", "of 1", "of 2"],
        "send_object": [None, None] if rank == 1 else ["of 0", "of 2"],
        "collect": ["of 0", "of 1", "of 2"] if rank == 0 else None,
        "send_to_domain_leaders": "from 0" if rank in leaders else None,
        "on_leader": 0,
        "on_rank": 1,
        "on_domain_leaders": leaders,
        "everywhere": [0, 1, 2],
        "other": [0, -1, -2],
        "wrong on the leader": ["ValueError: 0"],
        "wrong on rank 1": ["OSError: [Errno 28] full: 'file 1'"],
        "wrong on rank 2": ["KeyError: 2"] if rank == 2 else ["KeyError: 2", "PeerError: on rank 2"],
        "wrong collected": ["KeyError: 2"] if rank == 2 else ["KeyError: 2", "PeerError: on rank 2"],
        "wrong for leaders": ["ValueError: 0"],
        "wrong everywhere": [f"ValueError: {rank}"],
        "unsendable": ["UnsendableError: 1 and 0" if rank == 0 else "RuntimeError: UnsendableError: 1 and 0"],
        "after them": [0, 1, 2],
        "a copy": ([rank], rank == 1),
        "ran": ran,
    }


@pytest.mark.parametrize("domains", [[0, 0, 0], [0, 1, 0], [0, 1, 2]])
def test_all_calls_and_all_errors(start: Start, domains):
    for rank, found in enumerate(start(3, all_calls, domains)):
        gathered, block = found.pop("all_gather"), found.pop("block")
        assert found == expected(rank, domains)
        assert gathered == [{"rank": sent, "bytes": bytes(range(sent))} for sent in range(3)]
        assert block.tolist() == [3 if rank == 0 else rank] * 5


def lose_rank_1(rank: int, how: str) -> tuple[list[Any], float]:
    """Rank 1 dies or does not answer. Return the errors of rank 0's calls, and the seconds until the last error."""
    main_group = make_coordinator()
    coordinator = main_group.duplicate(timedelta(seconds=60 if how == "dies" else 2.0))
    assert main_group.all_gather(rank) == [0, 1]
    if rank == 1:
        if how == "dies":
            die()
        main_group.all_gather("has heard")
        return [], 0.0
    started = time.monotonic()
    block = torch.empty(3)
    calls = (
        lambda: coordinator.all_gather(1),
        lambda: coordinator.broadcast(None, 1),
        lambda: coordinator.on_rank(1, lambda: 1),
        lambda: coordinator.everywhere(lambda: 1),
        lambda: coordinator.receive(block, 1),
        lambda: coordinator.collect(lambda: 1),
    )
    caught = []
    for call in calls[: 6 if how == "dies" else 1]:
        with pytest.raises(LostPeer) as lost:
            call()
        caught.append(str(lost.value).partition(":")[0])
    seconds = time.monotonic() - started
    if how != "dies":
        main_group.all_gather("heard")
    return caught, seconds


@pytest.mark.parametrize("how", ["dies", "does not answer"])
def test_a_lost_rank(start: Start, how):
    (messages, seconds), other = start(2, lose_rank_1, how)
    assert set(messages) == {"a rank is gone, or did not answer in time"}
    assert len(messages) == (6 if how == "dies" else 1)
    if how == "dies":
        assert other == "died"
        assert seconds < 50
    else:
        assert 1.9 < seconds < 50


def fail_on_rank_1(rank: int) -> None:
    coordinator = make_coordinator()
    if rank == 1:
        raise ValueError("wrong")
    coordinator.all_gather(rank)


def test_an_exception_on_a_rank_fails_the_test(start: Start):
    with pytest.raises(AssertionError, match=r"rank 1:\n(.|\n)*ValueError: wrong"):
        start(2, fail_on_rank_1)


def stay(rank: int, seconds: float) -> None:
    time.sleep(seconds * rank)


def test_a_rank_that_does_not_end_fails_the_test(tmp_path):
    with pytest.raises(AssertionError, match=r"ranks \{1\} are still there after 0\.5 s"):
        run_thread_ranks(2, stay, 1.0, deadline_s=0.5)
    # In new processes the imports take longer, so rank 0 may not have ended either.
    with pytest.raises(AssertionError, match=r"ranks \{(0, )?1\} are still there after 2 s"):
        run_ranks(2, stay, 60.0, deadline_s=2, join=tmp_path)


def differ(rank: int) -> None:
    coordinator = make_coordinator()
    if rank == 0:
        coordinator.all_gather(1)
    else:
        coordinator.broadcast(1)


def test_threads_notice_when_ranks_make_different_calls():
    with pytest.raises(AssertionError, match=r"the ranks make different calls: \{0: 'all_gather', 1: 'broadcast'\}"):
        run_thread_ranks(2, differ)


def own_things(rank: int, settings: dict[str, int]) -> tuple[Any, ...]:
    """A rank's changes stay its own, as in a process, and apply in the threads that the rank starts."""
    coordinator, heard = make_coordinator(), list[str]()
    settings["rank"] = rank
    subscribe(heard.append)
    logged = messages()
    with replaced(time, "asctime", lambda: f"replaced by {rank}") if rank == 1 else replaced(events, "nothing", fail):
        coordinator.all_gather(None)

        def behind() -> None:
            events.announce(f"behind {this_rank()}")
            logging.getLogger("rlhf.test").warning("of rank %d", rank)

        thread = threading.Thread(target=behind)
        thread.start()
        thread.join()
        events.announce(f"in front {this_rank()}")
        clock = time.asctime()
        coordinator.all_gather(None)
    return settings, heard, logged, clock.startswith("replaced by")


def test_events_and_patches_of_thread_ranks_are_separate(monkeypatch):
    monkeypatch.setattr(events, "nothing", None, raising=False)
    listeners, settings = list(events._listeners), {"rank": 9}
    outcomes = run_thread_ranks(2, own_things, settings)
    for rank, outcome in enumerate(outcomes):
        assert outcome == ({"rank": rank}, [f"behind {rank}", f"in front {rank}"], [f"of rank {rank}"], rank == 1)
    assert settings == {"rank": 9}
    assert events._listeners == listeners
    assert this_rank() is None


def unsendable(rank: int, path: Path) -> None:
    make_coordinator().all_gather(lambda: path)


def test_objects_that_cannot_be_encoded_are_rejected(start: Start, tmp_path):
    with pytest.raises(AssertionError, match=r"cannot send an object of type builtins\.function"):
        start(2, unsendable, tmp_path)


def count_sent(rank: int) -> tuple[list[Any], int]:
    coordinator, sent, isend = make_coordinator(), [], dist.isend
    with replaced(dist, "isend", lambda *arguments, **named: sent.append(1) or isend(*arguments, **named)):
        return coordinator.all_gather("x" * rank), len(sent)


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (5, 3)])
def test_the_rounds_of_an_all_gather_grow_with_the_logarithm_of_the_ranks(ranks, rounds, tmp_path):
    """gloo's own all-gather is a ring: at 1,024 ranks, those of a step took 1 % of a minute."""
    found = run_ranks(ranks, count_sent, deadline_s=DEADLINE_S, join=tmp_path / "join")
    assert found == [(["x" * rank for rank in range(ranks)], 2 * rounds)] * ranks


def test_a_single_process_needs_no_process_group():
    coordinator = Coordinator(GlooTransport())
    unsendable = object()
    assert coordinator.all_gather(unsendable) == [unsendable]
    assert coordinator.broadcast(unsendable) is unsendable
    assert coordinator.duplicate(timedelta(seconds=1)).everywhere(lambda: 3) == [3]
    assert PeerError is not LostPeer
