"""Environment variables of the ranks of one machine, and the socket of their rendezvous."""

import os
import socket

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
STORE_FD = "RLHF_STORE_FD"
"""In rank 0: file descriptor of the listening socket for the store of the process group."""


def ranks_here() -> int:
    """Return the number of ranks on this rank's machine; 1 in a process that is not a rank."""
    return int(os.environ.get(LOCAL_WORLD_SIZE, "1"))


def listening_socket() -> socket.socket:
    """Return a socket that listens on a free port of the loopback interface, and so reserves the port."""
    return socket.create_server(("127.0.0.1", 0))


def rank_variables(rank: int, nproc: int, listener: socket.socket) -> dict[str, str]:
    """Return torchrun's variables for a rank of one machine with `nproc` ranks. Rank 0 must inherit `listener`."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        LOCAL_WORLD_SIZE: str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
    }
    if rank == 0:
        variables[STORE_FD] = str(listener.fileno())
    return variables
