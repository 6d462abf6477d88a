"""Device meshes for FSDP2: all ranks in one dimension, or replicas of a model that is sharded over some of them."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

NAMES = ("dp_replicate", "dp_shard")


def data_mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """The mesh of all ranks. Collective.

    With several `replicas` it is HSDP's: [replicas, ranks / replicas], consecutive ranks in one replica, so that
    weights are gathered within a machine where a replica fits on one. Groups of ranks are made once, for all models.
    """
    if replicas == 1:
        return init_device_mesh(device.type, (dist.get_world_size(),))
    return _replicated(dist.group.WORLD, device, replicas)


def replicas_of(mesh: DeviceMesh) -> int:
    """The number of replicas of what is on `mesh`."""
    return mesh.size(0) if mesh.ndim == len(NAMES) else 1


def replica_of(mesh: DeviceMesh) -> int:
    """The replica of which this rank has a part."""
    return mesh.get_local_rank(0) if mesh.ndim == len(NAMES) else 0


@functools.lru_cache(maxsize=1)
def _replicated(world: dist.ProcessGroup, device: torch.device, replicas: int) -> DeviceMesh:
    mesh = torch.arange(world.size()).view(replicas, -1)
    # Groups that a mesh makes for itself would wait as long as torch thinks, not trainer.collective_timeout_s.
    timeout = world._get_backend(device).options._timeout
    sharding, _ = dist.new_subgroups_by_enumeration(mesh.tolist(), timeout=timeout)
    replicating, _ = dist.new_subgroups_by_enumeration(mesh.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicating, sharding], device.type, mesh, mesh_dim_names=NAMES)
