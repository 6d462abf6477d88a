"""Throughput of saves and loads: bytes, seconds, and their figures in the metrics."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """Bytes written or read, and the seconds that it took."""

    bytes: int = 0
    seconds: float = 0.0


def throughput_figures(action: str, total: Throughput, by_part: Mapping[str, Throughput]) -> dict[str, float]:
    """Seconds, bytes and bytes per second: of all under `perf/ACTION_*`, of each part under `perf/ACTION_*/PART`."""
    figures: dict[str, float] = {}
    for name, moved in {"": total, **{f"/{part}": moved for part, moved in by_part.items()}}.items():
        figures[f"perf/{action}_seconds{name}"] = moved.seconds
        figures[f"perf/{action}_bytes{name}"] = moved.bytes
        figures[f"perf/{action}_bytes_per_second{name}"] = moved.bytes / max(moved.seconds, 1e-9)
    return figures
