"""Metrics of a run: metrics.jsonl is the truth, wandb and TensorBoard are rebuilt from it, a report sums it up."""

from rlhf.tracking.history import History, Record
from rlhf.tracking.report import read_report, write_report
from rlhf.tracking.tracker import Tracker, check_trackers
