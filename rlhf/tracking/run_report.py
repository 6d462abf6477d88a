"""Writes the report at the end of a run: numbers, a page, and a few lines of text."""

import json
import logging
from pathlib import Path

from rlhf.storage.files import make_dir_durably, replace_durably
from rlhf.tracking.page import write_page
from rlhf.tracking.report import PAGE, REPORT, report_text, summarize

log = logging.getLogger(__name__)


def write_report(run_dir: Path) -> str:
    """Write `report/report.json` and `report/report.html`, and return the text to show.

    If the page fails, only log a warning: `python -m rlhf.report` can write the page later.
    """
    report = summarize(run_dir)
    make_dir_durably((run_dir / REPORT).parent)
    replace_durably(run_dir / REPORT, json.dumps(report, indent=1).encode() + b"\n")
    try:
        write_page(run_dir / PAGE, [run_dir])
    except Exception as error:  # nothing about a page for users may change how a run ends
        kind = type(error).__name__
        log.warning("%s is not written (%s: %s). Try python -m rlhf.report %s.", PAGE, kind, error, run_dir)
    return report_text(report, run_dir)
