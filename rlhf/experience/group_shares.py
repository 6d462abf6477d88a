"""Shares of the ranks in the groups of a batch: as many of each mini-batch on every rank, as few as possible moved."""

from collections.abc import Sequence

from rlhf.experience.groups import Group, from_tensors, to_tensors
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.tensors import receive_tensors, send_tensors


def owners(groups: Sequence[Group], coordinator: Coordinator) -> dict[int, int]:
    """The rank that has each group, by uid, over all ranks. Collective."""
    uids = coordinator.gather([group.uid for group in groups])
    return {uid: rank for rank, of_rank in enumerate(uids) for uid in of_rank}


def share(mine: Sequence[Group], chosen: dict[int, int], mini_batch_size: int, coordinator: Coordinator) -> list[Group]:
    """This rank's part of a batch; only groups that change ranks are sent, as tensors, each to its taker. Collective.

    Args:
        mine: the groups that this rank has; those that are not chosen do not matter.
        chosen: the batch: uid -> rank that has the group, in order.
    """
    takers = dict(
        zip(chosen, equal_shares(list(chosen.values()), mini_batch_size, coordinator.world_size), strict=True)
    )
    rank, groups = coordinator.rank, {group.uid: group for group in mine}
    moves: dict[tuple[int, int], list[int]] = {}
    for uid, taker in takers.items():
        if taker != chosen[uid]:
            moves.setdefault((chosen[uid], taker), []).append(uid)
    for (owner, taker), uids in sorted(moves.items()):  # one order on all ranks, so that nobody waits in vain
        if rank == owner:
            send_tensors(coordinator, to_tensors([groups[uid] for uid in uids]), taker)
        elif rank == taker:
            groups |= {group.uid: group for group in from_tensors(receive_tensors(coordinator, owner))}
    return [groups[uid] for uid, taker in takers.items() if taker == rank]


def equal_shares(owners: Sequence[int], mini_batch_size: int, world_size: int) -> list[int]:
    """The rank that trains on each group, such that every rank has the same number in each mini-batch.

    Args:
        owners: the rank that has each group; `mini_batch_size` consecutive ones are a mini-batch, a multiple of
            `world_size`.

    Returns:
        A rank for each group. A rank keeps its first ones; the others go, in order, to the lowest rank with room.
    """
    takers, share = list(owners), mini_batch_size // world_size
    for start in range(0, len(owners), mini_batch_size):
        room, surplus = [share] * world_size, []
        for place in range(start, start + mini_batch_size):
            if room[owners[place]]:
                room[owners[place]] -= 1
            else:
                surplus.append(place)
        free = (rank for rank in range(world_size) for _ in range(room[rank]))
        for place, rank in zip(surplus, free, strict=True):
            takers[place] = rank
    return takers
