"""Environment variables of the ranks of one machine, and the socket at which they meet."""

import socket

STORE_FD = "RLHF_STORE_FD"
"""In rank 0 alone: the listening socket, as a file descriptor, on which it is to serve the store of the process
group."""


def listening_socket() -> socket.socket:
    """A socket that listens on a free port of this machine alone; who holds it has the port, so that nobody else can
    take it."""
    return socket.create_server(("127.0.0.1", 0))


def rank_variables(rank: int, nproc: int, listener: socket.socket) -> dict[str, str]:
    """torchrun's variables for `rank` of the `nproc` ranks of a single machine; rank 0 must inherit `listener`."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
    }
    if rank == 0:
        variables[STORE_FD] = str(listener.fileno())
    return variables
