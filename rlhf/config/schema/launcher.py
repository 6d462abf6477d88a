"""Section `launcher`: the launcher that starts and restarts the ranks."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class LauncherConfig:
    name: str = setting("local", choices=("local", "ray"), resume="harmless")
    """`local` supervises the ranks of this machine. `ray` places `trainer.nnodes` workers with `trainer.nproc` ranks
    each in a Ray cluster, and Ray restarts them."""
    address: str | None = setting(None, resume="harmless")
    """Address of the Ray cluster; null means RAY_ADDRESS if set, else the cluster of this machine."""
    min_nodes: int | None = setting(None, ge=1, resume="harmless")
    """Smallest number of machines on which Ray runs the job while others are missing; null means `trainer.nnodes`."""
    start_timeout_s: float = setting(60.0, gt=0, resume="harmless")
    """Seconds for Ray to place the workers. After each timeout Ray tries again, `trainer.max_restarts` times."""

    def node_counts(self, nnodes: int) -> range:
        """Return the numbers of machines with which a run of `nnodes` machines may run."""
        return range(self.min_nodes or nnodes, nnodes + 1)
