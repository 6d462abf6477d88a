"""Reads the process id and the scratch folder of a rollout server that this process keeps."""

from rlhf.rollout.servers.keeper import Keeper
from rlhf.rollout.servers.server_process import ServerProcess


def kept(server: ServerProcess):
    """The process, the URL and the scratch folder of a server that was started."""
    assert isinstance(server._keeper, Keeper)
    return server._keeper._servers[server._log]
