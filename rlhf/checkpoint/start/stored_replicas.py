"""Reads the number of replicas with which a run was saved. Imports no torch."""

from functools import partial
from itertools import chain
from pathlib import Path

import yaml

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.load.locations import locate_files, published
from rlhf.checkpoint.start.run_dir import resume_source
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.config.stored import stored_sections
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint, OtherFormat
from rlhf.storage.layout import CONFIG
from rlhf.storage.reading import CheckedFiles


def stored_replicas(run_dir: Path, trainer: TrainerConfig, coordinator: Coordinator) -> int | None:
    """Return `backend.dp_replicate` of the newest readable checkpoint of the run, or of the checkpoint from which the
    run starts; None if there is none, or if another number of ranks or another backend saved it. Collective."""
    source = resume_source(trainer)
    for path in chain(published(run_dir, coordinator), [] if source is None else [source]):
        try:
            located = locate_files(path, coordinator)
            if not located.missing:
                read = partial(_replicas, path, located.manifest, coordinator.world_size)
                return coordinator.on_rank(located.source_domain(CONFIG), read)
        except (DamagedCheckpoint, OtherFormat):
            continue  # the resume reports the damage
    return None


def _replicas(path: Path, manifest: Manifest, ranks: int) -> int | None:
    if manifest.imported or (manifest.world_size, manifest.backend) != (ranks, "fsdp2"):
        return None
    try:
        stored = stored_sections(CheckedFiles(path, manifest.files).content(CONFIG), manifest.release)
        replicas: int | None = stored["backend"]["dp_replicate"]
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as problem:
        raise DamagedCheckpoint(f"{path} is damaged: {problem}") from None
    return replicas
