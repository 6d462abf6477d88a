"""Chooses a run's number of replicas on several ranks: as in its checkpoint, or as its memory plan allows."""

import logging

from rlhf.checkpoint.start.stored_replicas import stored_replicas
from rlhf.config import Config
from rlhf.planning.check import models_of, target_of
from rlhf.planning.memory_plan import chosen_replicas, memory_plan, with_replicas
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.parent import machine

log = logging.getLogger(__name__)


def settle_replicas(config: Config, coordinator: Coordinator) -> Config:
    """Return `config`, with a number of replicas for FSDP2 on several ranks if `dp_replicate` was null. Collective.

    A resume on the same number of ranks keeps the number of replicas if it can, because sums of gradients over more or
    fewer replicas round differently. One replica per rank needs all ranks on one machine, because processors of
    several machines may round differently.
    """
    if config.backend.name != "fsdp2" or config.backend.dp_replicate is not None or coordinator.world_size == 1:
        return config
    replicas, why = stored_replicas(config.run_dir, config.trainer, coordinator), "as in the checkpoint"
    together = len(set(coordinator.all_gather(machine()))) == 1
    whole = coordinator.world_size
    if replicas == whole and not (together and coordinator.on_leader(lambda: _fits(config, whole))):
        if coordinator.is_leader:
            log.warning(
                "The checkpoint's %d whole replicas need one machine with enough memory. The ranks shard the model "
                "instead, and later steps round differently.",
                whole,
            )
        replicas, why = 1, "because whole replicas are not possible here"
    elif replicas is None:
        why = "by the memory plan"
        replicas = coordinator.on_leader(lambda: _planned(config)) if together else 1
    if coordinator.is_leader:
        log.info("backend.dp_replicate=%d on %d ranks, %s.", replicas, coordinator.world_size, why)
    return with_replicas(config, replicas)


def _fits(config: Config, replicas: int) -> bool:
    """Return whether whole replicas fit into this machine's memory: False on GPUs, True if a size is unknown."""
    models, target = models_of(config, from_config=False), target_of(config)
    if target.cuda:
        return False
    if models is None or target.memory is None:  # the memory needed or available is not known
        return True
    return memory_plan(with_replicas(config, replicas), models, target).peak.total <= target.memory


def _planned(config: Config) -> int:
    """Return the plan's number of replicas; one if the headers of the models' files are not enough for a plan."""
    models = models_of(config, from_config=False)
    return 1 if models is None else chosen_replicas(config, models, target_of(config))
