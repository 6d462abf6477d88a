"""Warnings of repeated training prompts, and of validation prompts that are training prompts."""

import json
import logging
from pathlib import Path

import pytest

from rlhf.config import DataConfig, RewardConfig
from rlhf.data import build_train_set, build_val_set, cached_prompts
from rlhf.data.repeats import warn_of_repeats
from tests.support.letters import letter_tokenizer
from tests.support.refusals import says

EXACT = RewardConfig(functions=["exact_match"])


def jsonl(path: Path, prompts: list[int], **columns) -> str:
    rows = [{"prompt": f"{n} + 1", "answer": str(n + 1)} | columns for n in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(params=["in memory", "cached"])
def warnings_of(request, monkeypatch, tmp_path, caplog):
    """The warnings for two files of prompts, that are in memory or mapped from the cache."""
    monkeypatch.setattr(cached_prompts, "LARGE", 1 if request.param == "cached" else 1 << 30)

    def of(train: str, val: str | None = None, **settings) -> list[str]:
        data = DataConfig(train_files=train, val_files=val, cache_dir=str(tmp_path / "cache"), **settings)
        tokenizer = letter_tokenizer()
        sets = [build(data, EXACT, 1, tokenizer) for build in (build_train_set, build_val_set)]
        caplog.clear()
        warn_of_repeats(sets[0], sets[1])
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    return of


def test_different_prompts_are_no_reason_to_warn(tmp_path, warnings_of):
    train = jsonl(tmp_path / "t.jsonl", [*range(1200), 7])  # less than a hundredth repeats
    assert warnings_of(train) == []
    assert warnings_of(train, jsonl(tmp_path / "v.jsonl", [*range(1200, 1300)])) == []


def test_repeated_training_prompts(tmp_path, warnings_of):
    (message,) = warnings_of(jsonl(tmp_path / "t.jsonl", [*range(100)] * 13))
    says(message, "data.train_files", "1200 of 1300", "Remove")


def test_validation_on_the_training_file(tmp_path, warnings_of):
    train = jsonl(tmp_path / "t.jsonl", [*range(50)])
    (message,) = warnings_of(train, train)
    says(message, "data.val_files", "50 of 50", "data.train_files", "data.val_files")
    (message,) = warnings_of(train, train, val_max_samples=20)
    says(message, "20 of 20")


def test_validation_on_a_copy_or_on_a_part_of_the_training_prompts(tmp_path, warnings_of):
    train = jsonl(tmp_path / "t.jsonl", [*range(50)])
    copied = jsonl(tmp_path / "v.jsonl", [*range(50)], extra_info={"split": "test"})
    says(warnings_of(train, copied)[0], "data.val_files", "50 of 50")
    says(warnings_of(train, jsonl(tmp_path / "w.jsonl", [*range(40, 60)]))[0], "data.val_files", "10 of 20")
