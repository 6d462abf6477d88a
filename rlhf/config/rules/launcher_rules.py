"""Checks the section `launcher`."""

import sys
from collections.abc import Iterator, Mapping

from rlhf.config import Config
from rlhf.config.rules.backend_rules import package_problem
from rlhf.config.rules.without_effect import without_effect

LEAST_RAY = "2.60"


def launcher_problems(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield one line per setting of `launcher` that the launcher cannot use."""
    launcher, t = config.launcher, config.trainer
    if launcher.name != "ray":
        keys = [f"launcher.{name}" for name in ("address", "min_nodes", "start_timeout_s")]
        yield from without_effect(config, keys, "launcher=ray", launcher.name)
        return
    if "RANK" in environ and "WORLD_SIZE" in environ:
        yield "launcher.name=ray: torchrun or srun started the ranks. Start the command once, without torchrun or srun."
    if launcher.min_nodes is not None and launcher.min_nodes > t.nnodes:
        yield (
            f"launcher.min_nodes={launcher.min_nodes}: must be at most trainer.nnodes={t.nnodes}. Set trainer.nnodes, "
            "the largest number of machines."
        )
    if t.callbacks:
        yield (
            f"trainer.callbacks={t.callbacks}: callbacks run in the supervisor, which launcher=ray replaces. Set "
            "trainer.callbacks=[], or follow metrics.jsonl in the run directory."
        )


def missing_ray(config: Config) -> Iterator[str]:
    """Yield one line if the launcher needs Ray, but this installation has none or an old one."""
    if config.launcher.name != "ray":
        return
    if sys.platform != "linux":
        yield f"launcher.name=ray: on {sys.platform} ranks would outlive a killed worker. Use Linux, or launcher=local."
    if problem := package_problem("ray", LEAST_RAY):
        yield f"launcher.name=ray: {problem}; run `pip install 'rlhf[ray]'`, or set launcher=local."
