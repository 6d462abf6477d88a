"""Publishes small checkpoints without a model by the real commit, for tests of later operations."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit import publication
from rlhf.checkpoint.commit.manifest import DOMAINS, Manifest, describe
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import Transport
from rlhf.storage.files import write_file
from rlhf.storage.layout import CONFIG, scan, step_of


def publish(
    run_dir: Path, step: int, metrics: dict[str, float] | None = None, nbytes: int = 100, config: str = ""
) -> Path:
    """Commit a checkpoint of `step` with `nbytes` random bytes, `metrics`, and the configuration text `config`."""
    temporary = publication.begin(run_dir, step)
    written = [write_file(temporary, "actor/model/weights", [os.urandom(nbytes)])]
    written.append(write_file(temporary, CONFIG, [config.encode()]))
    manifest = make_manifest(step, describe(written), metrics or {})
    return publication.publish(run_dir, temporary, step, manifest, Coordinator(Transport()))


def publish_part(run_dir: Path, step: int, coordinator: Coordinator, nbytes: int = 100) -> Path:
    """Commit a checkpoint of `step` over `coordinator`'s storage domains, with `nbytes` random bytes per rank.

    Collective.
    """
    root = run_dir / coordinator.on_leader(lambda: publication.temporary_name(step))
    name = f"actor/model/rank_{coordinator.rank:05d}"
    parts = coordinator.everywhere(lambda: describe([write_file(root, name, [os.urandom(nbytes)])]))
    files = {
        name: entry | {DOMAINS: [domain]}
        for domain, part in zip(coordinator.domains, parts, strict=True)
        for name, entry in part.items()
    }
    return publication.publish(run_dir, root, step, make_manifest(step, files, {}, coordinator.world_size), coordinator)


def make_manifest(
    step: int, files: dict[str, dict[str, Any]], metrics: dict[str, float], world_size: int = 1
) -> Manifest:
    """Return the manifest of a checkpoint with `files`."""
    return Manifest(
        step=step,
        world_size=world_size,
        backend="fsdp2",
        contents=["model"],
        roles=["actor"],
        config_hash="c" * 32,
        fingerprints={},
        created="2026-01-01T00:00:00+00:00",
        versions={"rlhf": "0"},
        threads=[1] * world_size,
        numerics=1,
        files=files,
        metrics=metrics,
    )


def steps(run_dir: Path) -> list[int | None]:
    """Return the published steps, oldest first."""
    return [step_of(path) for path in scan(run_dir)][::-1]


def eventually(condition: Callable[[], bool], deadline_s: float = 120.0) -> None:
    """Wait for another thread to fulfil `condition`; fail after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
