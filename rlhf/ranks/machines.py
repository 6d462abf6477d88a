"""Finds out on which machine and GPU each rank runs, before the ranks connect to each other."""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import UserError
from rlhf.ranks.parent import machine
from rlhf.ranks.world import LOCAL_WORLD_SIZE

if TYPE_CHECKING:
    from torch.distributed import Store

_NETWORK = Path("/proc/self/ns/net")
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables with the network interface on which gloo and NCCL listen."""
START_FEWER_RANKS = (
    "Start one rank for each GPU that is visible on a machine (torchrun: --nproc-per-node), or set trainer.device=cpu."
)


def settle_places(store: "Store", rank: int, world_size: int, gpu: str, *, remote_servers: bool) -> None:
    """Exchange each rank's machine and GPU through `store`, and set this rank's environment. Collective.

    If all ranks run on one machine, they listen on its loopback interface only, unless an environment variable names
    another interface. LOCAL_WORLD_SIZE becomes the number of ranks on this machine, if the launcher has not set it.

    Args:
        gpu: unique name of this rank's GPU; empty on a CPU.
        remote_servers: whether NCCL also sends weights to rollout servers, which may run on other machines.

    Raises:
        UserError: on every rank, if two ranks use one GPU.
    """
    here = f"{machine()} {_NETWORK.readlink() if _NETWORK.exists() else ''}"
    store.set(f"place/{rank}", json.dumps([here, gpu]))
    places = [json.loads(place) for place in store.multi_get([f"place/{each}" for each in range(world_size)])]
    _reject_shared_gpus([name for _, name in places])
    machines = [name for name, _ in places]
    os.environ.setdefault(LOCAL_WORLD_SIZE, str(machines.count(here)))
    if set(machines) == {here}:
        os.environ.setdefault(GLOO_INTERFACE, _LOOPBACK)
        if not remote_servers:
            os.environ.setdefault(NCCL_INTERFACE, _LOOPBACK)


def _reject_shared_gpus(gpus: list[str]) -> None:
    users: defaultdict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(gpus):
        if gpu:
            users[gpu].append(rank)
    for gpu, ranks in users.items():
        if len(ranks) > 1:
            raise UserError(
                f"trainer.device=cuda: the ranks {', '.join(map(str, ranks))} use the same GPU ({gpu}), and each rank "
                f"needs its own. {START_FEWER_RANKS}"
            )
