"""Writes TensorBoard event files that show each step once and in order, even after kills."""

from pathlib import Path
from typing import Any

from rlhf.storage.files import rename
from rlhf.tracking.history import History
from rlhf.tracking.outcome import Outcome
from rlhf.tracking.sample_files import GENERATIONS, GenerationsTable, markdown_table

_PREFIX = "events.out.tfevents."


class TensorBoard:
    """Writes `<run_dir>/tensorboard`, with all metrics of a step in one event, so that no step is incomplete."""

    def __init__(self, log_dir: Path, table: GenerationsTable) -> None:
        self._log_dir, self._table = log_dir, table
        self._writer: Any = None

    def start(self, history: History) -> None:
        """Purge the events from the first missing step on, and write `history` again from the same step on."""
        from torch.utils.tensorboard import SummaryWriter

        self.finish()
        self._number_files()
        shown, first = self._shown_steps(), 0
        for step in history.steps():
            if step >= len(shown) or not shown[step]:
                first = step
                break
            first = step + 1
        # Readers drop the events of earlier files from purge_step on.
        self._writer = SummaryWriter(str(self._log_dir), purge_step=first)
        for record in history.records(first):
            self._write(record["step"], {name: value for name, value in record.items() if name != "step"})
        self._writer.flush()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step and flush, because a kill loses the writer's queue."""
        self._write(step, metrics)
        self._writer.flush()

    def finish(self, outcome: Outcome = "finished") -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)
        if rows := self._table.of(step):
            self._writer.add_text(GENERATIONS, markdown_table(self._table.COLUMNS, rows), step)

    def _number_files(self) -> None:
        """Rename the event files to 0, 1, 2 and so on, in their order, so that the next file sorts after all of them.

        Readers order files by name, and torch names a file by the time of its creation, in seconds. After a clock was
        set back, or with two starts in one second, the next file could come before an earlier file.
        """
        for number, path in enumerate(sorted(self._log_dir.glob(f"{_PREFIX}*"))):
            rest = path.name.removeprefix(_PREFIX).lstrip("0123456789")
            if (target := path.with_name(f"{_PREFIX}{number:010d}{rest}")) != path:
                rename(path, target)

    def _shown_steps(self) -> bytearray:
        """Return an array with 1 at the index of each step that the event files show, else 0."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.compat.proto.event_pb2 import SessionLog

        shown = bytearray()
        for path in sorted(self._log_dir.glob(f"{_PREFIX}*")):
            # Read one event at a time: an EventAccumulator keeps all values in memory.
            for event in LegacyEventFileLoader(str(path)).Load():
                if event.session_log.status == SessionLog.START:
                    del shown[event.step :]
                elif event.HasField("summary"):
                    shown.extend(bytes(max(0, event.step + 1 - len(shown))))
                    shown[event.step] = 1
        return shown
