"""Records a run's metrics: metrics.jsonl is the source of truth; wandb, TensorBoard and reports derive from it."""

from rlhf.tracking.history import History, Record
from rlhf.tracking.report import read_report
from rlhf.tracking.run_report import write_report
from rlhf.tracking.tracker import Tracker, check_trackers
