"""Describes the throughput of saves and loads: bytes, seconds, and their metrics."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """Bytes written or read, and the seconds that this took."""

    bytes: int = 0
    seconds: float = 0.0


def throughput_metrics(action: str, total: Throughput, by_part: Mapping[str, Throughput]) -> dict[str, float]:
    """Return seconds, bytes and bytes per second: totals as `perf/ACTION_*`, each part's as `perf/ACTION_*/PART`."""
    metrics: dict[str, float] = {}
    for name, moved in {"": total, **{f"/{part}": moved for part, moved in by_part.items()}}.items():
        metrics[f"perf/{action}_seconds{name}"] = moved.seconds
        metrics[f"perf/{action}_bytes{name}"] = moved.bytes
        metrics[f"perf/{action}_bytes_per_second{name}"] = moved.bytes / max(moved.seconds, 1e-9)
    return metrics
