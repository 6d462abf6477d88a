"""The run directories of a run whose nodes have disks of their own, before it starts: what run_dir.py does for one, on all together.

Nodes may have been swapped since the last start, come with an empty disk, or have been killed in the middle of a commit.
"""

import logging
from pathlib import Path
from typing import Any

import xxhash

from rlhf.checkpoint.commit import publication
from rlhf.checkpoint.commit.manifest import read_manifest, verify_files
from rlhf.checkpoint.load.locations import find_parts, published
from rlhf.checkpoint.start import run_dir
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import remove_file, replace_durably
from rlhf.storage.layout import HISTORY, MANIFEST, TEMPORARY, step_dir, step_of

log = logging.getLogger(__name__)


def prepare_together(config: Config, coordinator: Coordinator) -> None:
    """`run_dir.prepare` on the disk of each storage domain, whose leaders hold the run locks. Collective; raises the same on every rank."""
    if len(coordinator.domain_leaders) == 1:
        coordinator.on_leader(lambda: run_dir.prepare(config))
        return
    if config.checkpoint.remote is not None:
        raise UserError(
            f"checkpoint.remote={config.checkpoint.remote}: the nodes have disks of their own, and copies are made of checkpoints that "
            "lie on one. Set checkpoint.remote=null, or trainer.default_local_dir to a folder that all nodes share."
        )
    here = config.run_dir
    coordinator.on_domain_leaders(lambda: run_dir.make(config))
    complete_commits(here, coordinator)
    coordinator.on_domain_leaders(lambda: run_dir.tidy(config))
    run = _agreed_run(here, coordinator)
    _bring_history(here, run["run_id"], coordinator)
    source = run_dir.resume_source(config)
    if source is not None and coordinator.broadcast(str(source)) != run.get("resumed_from"):
        there = coordinator.on_domain_leaders(lambda: step_of(source) is not None and source.is_dir())
        if not any(there):
            raise run_dir.no_source(source)
        coordinator.on_domain_leaders(lambda: run_dir.set_aside_for(here, source))
        run |= coordinator.on_leader(lambda: run_dir.forked(source))
    coordinator.on_domain_leaders(lambda: run_dir.write_run_file(here, run))


def complete_commits(here: Path, coordinator: Coordinator) -> None:
    """Publish what a kill between the renames of two domains has left: a checkpoint that one has published is whole in all of them."""
    ready = coordinator.on_domain_leaders(lambda: _sealed(here))
    hashes = {found for sealed in ready for found in sealed.values()}
    if not hashes:
        return
    out = coordinator.on_domain_leaders(lambda: {_hash(path) for path in run_dir.scan(here)} & hashes)
    committed = set().union(*out)

    def complete() -> None:
        for name, manifest_hash in _sealed(here).items():
            step = _step_of_sealed(here / name)
            if manifest_hash in committed and step is not None and not step_dir(here, step).exists():
                publication.give_name(here, here / name, step)
                publication.point_to(here, step)
                log.warning(
                    "The commit of step %d was interrupted between the nodes' disks, and is complete now.", step
                )

    coordinator.on_domain_leaders(complete)


def _sealed(here: Path) -> dict[str, str]:
    """Temporary directories with a valid manifest, by name: its hash."""
    found = (
        p for p in here.iterdir() if p.name.startswith(f"{TEMPORARY}global_step_") and _step_of_sealed(p) is not None
    )
    return {path.name: manifest_hash for path in found if (manifest_hash := _hash(path)) is not None}


def _step_of_sealed(path: Path) -> int | None:
    try:
        return read_manifest(path).step
    except DamagedCheckpoint:
        return None


def _hash(path: Path) -> str | None:
    try:
        return xxhash.xxh3_128((path / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None


def _agreed_run(here: Path, coordinator: Coordinator) -> dict[str, Any]:
    """The run's identity: as the driver's disk has it or, where that is new, another's; else of the newest checkpoint, or a new one."""
    known = [run for run in coordinator.on_domain_leaders(lambda: run_dir.read_run_file(here)) if run]
    if len({run["run_id"] for run in known}) > 1 and coordinator.is_leader:
        names = ", ".join(run["run_id"] for run in known)
        log.warning("The nodes' disks are of different runs (run.json: %s); going on as %s.", names, known[0]["run_id"])
    if known:
        return known[0]
    ids = [run_id for run_id in coordinator.on_domain_leaders(lambda: run_dir.newest_run_id(here)) if run_id]
    return {"run_id": ids[0] if ids else coordinator.on_leader(run_dir.new_run_id)}


def _bring_history(here: Path, run_id: str, coordinator: Coordinator) -> None:
    """Move the metric history to the driver's disk: it lies where the last driver was, and is the longest there is."""
    path = here / HISTORY

    def length() -> int:
        of_this_run = run_dir.read_run_file(here).get("run_id", run_id) == run_id
        return path.read_bytes().count(b"\n") if of_this_run and path.exists() else 0

    lengths = dict(zip(coordinator.domain_leaders, coordinator.on_domain_leaders(length), strict=True))
    longest = max(lengths, key=lambda domain: (lengths[domain], -domain))
    if longest != 0:
        content = coordinator.on_rank(longest, path.read_bytes)
        coordinator.on_leader(lambda: replace_durably(path, content))
        if coordinator.is_leader:
            log.info("The metric history was on another node's disk and is on the driver's now.")
    if any(lengths[domain] for domain in lengths if domain != 0):
        # One history: a part of it that stayed behind could be taken for a newer one after the next swap.
        coordinator.on_domain_leaders(lambda: None if coordinator.is_leader else remove_file(path, missing_ok=True))


def finished_together(config: Config, coordinator: Coordinator) -> int | None:
    """`run_dir.finished_step` over all storage domains. Collective."""
    here = config.run_dir
    if len(coordinator.domain_leaders) == 1:
        return coordinator.on_leader(lambda: run_dir.finished_step(config))
    for path in published(here, coordinator):
        try:
            parts = find_parts(path, coordinator)
        except DamagedCheckpoint:
            return None
        if parts.nowhere:
            continue
        drivers = coordinator.on_domain_leaders(lambda: run_dir.driver_state_of(path) if path.exists() else None)  # noqa: B023
        driver = next((driver for driver in drivers if driver is not None), None)
        if driver is None or driver["step"] < run_dir.planned_steps(config, driver["steps_per_epoch"]):
            return None
        mine = [name for name in parts.manifest.files if parts.holder(name) == coordinator.domain]
        problems = coordinator.on_domain_leaders(lambda: verify_files(path, parts.manifest, mine))  # noqa: B023
        return None if any(problems) else driver["step"]
    return None
