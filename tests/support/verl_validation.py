"""Validation metrics by verl's own code: a script for the environment that has verl.

    python verl_validation.py CASES

`CASES` is JSON, a list of objects with the arguments `data_sources`, `sample_uids` and `infos_dict` of verl's function;
prints a list of what it returns.
"""

import json
import sys
from pathlib import Path

from verl.trainer.ppo.metric_utils import process_validation_metrics

if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout.write("\n" + json.dumps([process_validation_metrics(**case) for case in cases]))
