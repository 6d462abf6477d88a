"""Warns of reference answers that are numbers."""

import json
import logging

import pytest

from rlhf.config import DataConfig, RewardConfig
from rlhf.data import build_train_set
from rlhf.data.answers import warn_of_numbers
from tests.support.letters import letter_tokenizer


@pytest.mark.parametrize(
    ("answer", "functions", "warns"),
    [
        (42, ["exact_match", "rewards.py:score"], True),
        (4.5, ["rewards.py:score"], True),
        ("42", ["rewards.py:score"], False),
        (42, ["exact_match"], False),
        (None, ["rewards.py:score"], False),
        (True, ["rewards.py:score"], False),
    ],
)
def test_numeric_answers_for_a_custom_reward_function_log_a_warning(answer, functions, warns, tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "40 + 2", "answer": answer}) + "\n")
    data = DataConfig(train_files=str(tmp_path / "rows.jsonl"))
    prompts = build_train_set(data, RewardConfig(functions=["reward_model"]), 1, letter_tokenizer())
    caplog.clear()
    warn_of_numbers(prompts, "data.train_files", functions)
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == warns
    for text in texts:
        assert type(answer).__name__ in text
        assert "rewards.py:score" in text
        assert "exact_match" not in text
        assert "str(ground_truth)" in text
