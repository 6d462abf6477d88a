"""Runs on rows of a user's function: they resume bit for bit, detect changed rows, and warn about prompts."""

import json

from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from tests.support.compare_runs import history
from tests.support.forked_start import train_forked
from tests.support.launching import small
from tests.support.refusals import says

CODE = """
import random

def to_row(row):
    a, b = row["terms"]
    return {"prompt": f"{a}+{b}=", "answer": str(a + b), "level": random.random()}

def breaks(row):
    return {"prompt": row["term"]}
"""
TERMS = [{"terms": [n % 5, n // 5]} for n in range(16)]


def test_rows_of_a_function(tmp_path):
    rows, code = tmp_path / "terms.jsonl", tmp_path / "rows.py"
    rows.write_text("".join(json.dumps(row) + "\n" for row in TERMS))
    code.write_text(CODE)

    def run(name: str, *more: str, function: str = "to_row"):
        custom = [f"data.custom_cls.path={code}", f"data.custom_cls.name={function}"]
        return train_forked(small(tmp_path, name, rows, "trainer.nproc=2", *custom, *more))

    end = run("whole", f"data.val_files={rows}", "trainer.test_freq=4")
    assert end.code == EXIT_DONE, end.output
    assert end.output.count("16 of 16 prompts are also in data.train_files") == 1
    start = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/rlhf/whole/global_step_3"]
    end = run("resumed", *start, f"data.val_files={rows}", "trainer.test_freq=4")
    assert end.code == EXIT_DONE, end.output
    assert history(tmp_path / "rlhf" / "whole")[-4:] == history(tmp_path / "rlhf" / "resumed")

    code.write_text(CODE.replace("str(a + b)", "str(b - a)"))
    end = run("other", *start)
    assert end.code == EXIT_USER_ERROR
    says(end.output, "data.custom_cls", "differ from the checkpoint", "trainer.allow_config_change=true")

    end = run("broken", function="breaks")
    assert end.code == EXIT_USER_ERROR
    says(end.output, "terms.jsonl line 1", "rows.py:breaks", "KeyError", "term")
    assert "Traceback" not in end.output
    code.write_text(CODE + "import no_such_module\n")
    end = run("broken")
    assert end.code == EXIT_USER_ERROR
    says(end.output, "data.custom_cls", "rows.py:to_row", "no_such_module")
