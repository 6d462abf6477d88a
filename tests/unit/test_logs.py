"""Log of a rank: the libraries' chatter and progress bars are off though the rank has imported them before."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from transformers.utils import logging
from huggingface_hub.utils import are_progress_bars_disabled
from rlhf.ranks.logs import configure_logging
configure_logging(int(sys.argv[1]))
print(logging.get_verbosity() == logging.ERROR, logging.is_progress_bar_enabled(), are_progress_bars_disabled())
"""


@pytest.mark.parametrize(("rank", "bars"), [(0, "True False"), (1, "False True")])
def test_a_rank_is_quiet(monkeypatch, rank, bars):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(rank)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", *bars.split()]
