"""Keeps the newest checkpoints, every n-th, and the best by a metric; removes all other checkpoints after each save.

Decisions depend only on the directory's contents, so a restart does not change them. A process caches the metrics that
it has read from manifests.
Hard links between checkpoints need no code: the file system keeps a file while any checkpoint links it.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.commit.removal import to_trash
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.events import announce
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import MANIFEST, scan, step_dir, step_of
from rlhf.tracking.headline import ACCURACY, REWARD, headline

log = logging.getLogger(__name__)
NO_VALUE = math.nan
"""Metric value of a checkpoint whose manifest lacks the metric, because its step was not evaluated."""


def reasons(values: Mapping[int, float | None], settings: CheckpointConfig) -> dict[int, list[str]]:
    """Return the reasons to keep each step's checkpoint: any of `newest`, `for good`, `best`, `unreadable`, or none.

    `values` is from `metric_values`. A value that is not finite is never best; of two equal values the newer is better.
    None means an unreadable manifest. Its checkpoint may be among the best, so it stays while `keep_best` is set.
    """
    steps = sorted(values, reverse=True)
    ranked = sorted(((value, step) for step, value in values.items() if value is not None and math.isfinite(value)))
    every, best = settings.keep_every, settings.keep_best
    kept = {
        # Promise 9.
        "newest": set(steps[: settings.max_to_keep]),
        # Step 0 is a multiple of every `keep_every`, but it is the state before training.
        "for good": {step for step in steps if every and step and step % every == 0},
        "best": {step for _, step in ranked[::-1][:best]},
        # Promise 10.
        "unreadable": {step for step in steps if best and values[step] is None},
    }
    return {step: [reason for reason, chosen in kept.items() if step in chosen] for step in steps}


def metric_values(
    metrics: Mapping[int, Mapping[str, float] | None], settings: CheckpointConfig
) -> dict[int, float | None]:
    """Return each step's value of the metric by which `keep_best` ranks; None if the metrics are unknown."""
    name = ranking_metric(metrics.values(), settings)
    return {step: None if each is None else each.get(name, NO_VALUE) for step, each in metrics.items()}


def ranking_metric(metrics: Iterable[Mapping[str, float] | None], settings: CheckpointConfig) -> str:
    """Return `settings.best_metric`. If it is null, return the headline metric of checkpoints with these `metrics`."""
    if settings.best_metric is not None:
        return settings.best_metric
    # Use one metric for all checkpoints: values of different metrics cannot be compared.
    return (REWARD if any(headline(each) == REWARD for each in metrics if each) else ACCURACY).metric


def victims(
    run_dir: Path,
    settings: CheckpointConfig,
    newest_step: int,
    coordinator: Coordinator,
    new_metrics: Mapping[str, float] | None = None,
) -> list[Path]:
    """Return the checkpoints that no rule keeps once `newest_step` is published, oldest first. Collective.

    Never returns `newest_step`. If one storage domain keeps a step, all domains keep it, so that the checkpoint stays
    complete. `new_metrics` are the metrics of `newest_step` before its publication. A checkpoint later than
    `newest_step` is damaged and could not be set aside. It counts neither as newest nor as best, and is not returned.
    Raises OSError on every rank if a disk cannot be read.
    """
    by_domain = coordinator.on_domain_leaders(lambda: _removable(run_dir, settings, newest_step, new_metrics))
    steps = sorted({step for removable in by_domain for step in removable})
    return [step_dir(run_dir, step) for step in steps if all(removable.get(step, True) for removable in by_domain)]


def _removable(
    run_dir: Path, settings: CheckpointConfig, newest_step: int, new_metrics: Mapping[str, float] | None
) -> dict[int, bool]:
    paths = {step: path for path in scan(run_dir) if (step := step_of(path)) is not None}
    metrics = {step: _stored_metrics(path, settings) for step, path in paths.items() if step <= newest_step}
    # While `python -m rlhf.checkpoint prune` runs, the run itself may remove checkpoints.
    paths = {step: path for step, path in paths.items() if path.exists()}
    metrics = {step: figures for step, figures in metrics.items() if step in paths}
    if new_metrics is not None:
        metrics[newest_step] = new_metrics
    reasons_by_step = reasons(metric_values(metrics, settings), settings)
    return {step: step != newest_step and reasons_by_step.get(step) == [] for step in paths}


def _stored_metrics(path: Path, settings: CheckpointConfig) -> Mapping[str, float] | None:
    if not settings.keep_best:
        return {}
    try:
        status = (path / MANIFEST).stat()
        version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return _metrics(path, version)
    except (DamagedCheckpoint, OSError) as error:
        if path.exists():
            log.warning("%s is kept, because it may be among the best. Its metrics cannot be read: %s", path, error)
        return None


@cache
def _metrics(path: Path, version: tuple[int, ...]) -> dict[str, float]:
    """Return a checkpoint's metrics. Each save needs the metrics of up to thousands of checkpoints, so they are cached
    by the manifest's `version`."""
    return read_manifest(path).metrics


def retire(run_dir: Path, settings: CheckpointConfig, step: int, deleter: Deleter, coordinator: Coordinator) -> None:
    """Remove the checkpoints that no rule keeps, the same in all storage domains. Call after a publication. Collective.

    Never raises for a disk error, because an old checkpoint that cannot be removed only costs disk space.
    """
    try:
        paths = victims(run_dir, settings, step, coordinator)
        coordinator.on_domain_leaders(lambda: remove_checkpoints(paths, deleter))
    except OSError as error:
        if coordinator.is_leader:
            log.error("An old checkpoint in %s could not be removed: %s", run_dir, error)


def remove_checkpoints(paths: Iterable[Path], deleter: Deleter) -> None:
    """Rename the checkpoints that exist here to trash; `deleter` deletes them."""
    for path in paths:
        if path.exists():
            announce("commit.prune")
            deleter.submit(to_trash(path))
