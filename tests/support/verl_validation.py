"""Computes validation metrics with verl's code, in the environment that has verl.

    python verl_validation.py CASES

`CASES` is a JSON list of objects with the arguments `data_sources`, `sample_uids` and `infos_dict` of verl's function.
Prints a list of the function's results.
"""

import json
import sys
from pathlib import Path

from verl.trainer.ppo.metric_utils import process_validation_metrics

if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout.write("\n" + json.dumps([process_validation_metrics(**case) for case in cases]))
