"""Small checkpoints without a model, published by the real commit, for tests of what happens to them afterwards."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from rlhf.checkpoint.commit import publication
from rlhf.checkpoint.commit.manifest import Manifest, describe
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import LoneTransport
from rlhf.storage.files import write_file
from rlhf.storage.layout import CONFIG, scan, step_of


def publish(
    run_dir: Path, step: int, metrics: dict[str, float] | None = None, nbytes: int = 100, config: str = ""
) -> Path:
    """Commit a checkpoint of `step` that holds `nbytes` random bytes, `metrics`, and the text `config` as its
    configuration."""
    temporary = publication.begin(run_dir, step)
    written = [write_file(temporary, "actor/model/weights", [os.urandom(nbytes)])]
    written.append(write_file(temporary, CONFIG, [config.encode()]))
    manifest = Manifest(
        step=step,
        world_size=1,
        backend="fsdp2",
        contents=["model"],
        roles=["actor"],
        config_hash="c" * 32,
        fingerprints={},
        created="2026-01-01T00:00:00+00:00",
        versions={"rlhf": "0"},
        files=describe(written),
        metrics=metrics or {},
    )
    return publication.publish(run_dir, temporary, manifest, Coordinator(LoneTransport()))


def steps(run_dir: Path) -> list[int | None]:
    """The published steps, oldest first."""
    return [step_of(path) for path in scan(run_dir)][::-1]


def eventually(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Wait for what another thread does; fails after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
