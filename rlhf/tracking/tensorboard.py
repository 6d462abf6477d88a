"""TensorBoard event files that show every step once and in order, whatever was killed while they were written."""

from pathlib import Path
from typing import Any

from rlhf.tracking.history import Record


class TensorBoard:
    """Writes `<run_dir>/tensorboard`; one event holds all metrics of a step, so that no step is half there."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._writer: Any = None

    def start(self, records: list[Record]) -> None:
        """Purge from the first step that the event files lack, or else the one after the history, and refill."""
        from torch.utils.tensorboard import SummaryWriter

        self.finish()
        shown = self._shown_steps()
        missing = [record["step"] for record in records if record["step"] not in shown]
        last = records[-1]["step"] if records else -1
        first = min(missing, default=last + 1)
        # Readers drop the events of earlier files from purge_step on.
        self._writer = SummaryWriter(str(self._log_dir), purge_step=first)
        for record in records:
            if record["step"] >= first:
                self._write(record["step"], {name: value for name, value in record.items() if name != "step"})
        self._writer.flush()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step through to the file: what stays in the writer's queue dies with the process."""
        self._write(step, metrics)
        self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)

    def _shown_steps(self) -> set[int]:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

        if not self._log_dir.is_dir():
            return set()
        events = EventAccumulator(str(self._log_dir), size_guidance={SCALARS: 0}).Reload()
        return {event.step for tag in events.Tags()[SCALARS] for event in events.Scalars(tag)}
