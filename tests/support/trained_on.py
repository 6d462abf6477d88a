"""Records the samples that each step of a run trains on (RLHF_EVENT_LISTENER)."""

import json
import os
from pathlib import Path
from typing import Any

from rlhf.events import LISTENER_VARIABLE
from rlhf.experience import collector
from tests.support import interrupter

VARIABLE = "RLHF_TEST_TRAINED_ON"


def recording(folder: Path, interruption: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment that records to `folder` and interrupts by `interrupter.at`."""
    folder.mkdir(parents=True, exist_ok=True)
    return (interruption or {}) | {LISTENER_VARIABLE: f"{__name__}:on_event", VARIABLE: str(folder)}


def on_event(event: str) -> None:
    """Install the recorder."""
    if interrupter.VARIABLE in os.environ:
        interrupter.on_event(event)


def trained_on(folder: Path) -> dict[int, set[tuple[int, int]]]:
    """Return by step the (uid, number) of each sample, from the step's last execution."""
    last: dict[tuple[int, str], list[list[int]]] = {}
    for path in sorted(folder.iterdir()):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            last[record["step"], path.name] = record["samples"]
    found: dict[int, set[tuple[int, int]]] = {}
    for (step, _), samples in last.items():
        of_rank = {(uid, number) for uid, number in samples}
        assert len(of_rank) == len(samples), f"step {step} trains on a sample twice"
        assert not found.setdefault(step, set()) & of_rank, f"two ranks train on a sample in step {step}"
        found[step] |= of_rank
    return found


def _install(folder: Path) -> None:
    collate, collect = collector.collate, collector.Collector.collect
    samples: list[tuple[int, int]] = []

    def recording_collate(groups: Any, *rest: Any) -> Any:
        samples[:] = [(sample.uid, sample.sample) for group in groups for sample in group.samples]
        return collate(groups, *rest)

    def recording_collect(self: collector.Collector, step: int) -> Any:
        collected = collect(self, step)
        with (folder / f"rank_{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps({"step": step, "samples": samples}) + "\n")
        return collected

    collector.collate = recording_collate
    collector.Collector.collect = recording_collect  # type: ignore[method-assign]


if VARIABLE in os.environ:
    _install(Path(os.environ[VARIABLE]))
