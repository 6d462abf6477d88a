"""Rows from the user's code: a function that maps rows, or a dataset class like verl's, and errors for mistakes."""

import json
import random
from pathlib import Path

import pytest

from rlhf.compose import compose_config
from rlhf.config import DataConfig, RewardConfig
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.config.schema.data import CustomClsConfig
from rlhf.data import PromptSet, build_train_set, check_sources
from tests.support.letters import letter_tokenizer
from tests.support.refusals import says, user_error

EXACT = RewardConfig(functions=["exact_match"])
CODE = '''
import random

import numpy as np

START = random.random()

def to_row(row):
    if row["from"] == "nobody":
        return row["missing"]
    return {"prompt": row["from"], "answer": np.int64(3), "level": START + random.random()}

def text(row):
    return "x"

def two(a, b): ...

class Numbers:
    """As verl's: reads the files itself, and its items have raw_prompt."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        assert config.get("return_raw_chat") and config.max_prompt_length == 64, config
        assert (processor, max_samples) == (None, config.get("train_max_samples") or -1)
        assert tokenizer.chat_template
        self.numbers = [line for file in data_files for line in open(file).read().split()]

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        chat = np.array([{"role": "user", "content": self.numbers[i]}], dtype=object)
        return {"raw_prompt": chat, "reward_model": {"ground_truth": "7"}, "input_ids": np.arange(3)}

class Plain:
    def __init__(self, data_files):
        pass
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return ["no", "dict"]

def odd(row):
    made = {"object": object(), "key": {(1, 2): 3}, "set": {1, 2}, "numbers": {np.int64(1): np.float32(0.5)}}
    if row["odd"] == "name":
        return {0: "x", "question": "1"}
    made["deep"] = [[]]
    for _ in range(250):
        made["deep"] = [made["deep"]]
    made["itself"] = [1]
    made["itself"].append(made["itself"])
    return {"prompt": "x", "answer": "1", "extra_info": {"odd": made[row["odd"]]}}

class Sizes:
    def __init__(self, data_files):
        pass
    def __len__(self):
        return 2
'''


@pytest.fixture
def own(tmp_path):
    """Return a function that makes settings for rows from `name`, a function or class in CODE."""
    (tmp_path / "rows.py").write_text(CODE)

    def data_of(name: str, *rows: dict, file: str = "t.jsonl", text: str = "", **settings) -> DataConfig:
        (tmp_path / file).write_text(text or "".join(json.dumps(row) + "\n" for row in rows))
        custom = CustomClsConfig(f"{tmp_path}/rows.py", name)
        return DataConfig(train_files=f"{tmp_path}/{file}", custom_cls=custom, max_prompt_length=64, **settings)

    return data_of


def build(data: DataConfig, reward: RewardConfig = EXACT) -> PromptSet:
    return build_train_set(data, reward, 1, letter_tokenizer())


def test_a_function_makes_each_row_from_all_its_columns(own, tmp_path):
    (tmp_path / "rewards.py").write_text("def f(solution_str, level): ...")
    data = own("to_row", {"from": "1 + 2", "other": 1}, {"from": "2 + 1"})
    assert check_sources(data, EXACT, 1) is None
    prompts = build(data, RewardConfig(functions=[f"{tmp_path}/rewards.py:f"]))
    assert [(p.index, p.messages[0]["content"], p.ground_truth, p.data_source) for p in prompts] == [
        (0, "1 + 2", 3, "t"),
        (1, "2 + 1", 3, "t"),
    ]
    assert prompts[0].columns["level"] != prompts[1].columns["level"]


def test_random_numbers_repeat_and_do_not_disturb_the_run(own, tmp_path):
    (tmp_path / "rewards.py").write_text("def f(solution_str, level): ...")
    rewards = RewardConfig(functions=[f"{tmp_path}/rewards.py:f"])
    data = own("to_row", {"from": "1 + 2"})
    random.seed(1)
    expected = random.random()
    random.seed(1)
    first = build(data, rewards)
    assert random.random() == expected
    assert build(data, rewards).fingerprint == first.fingerprint, "other ranks and a resume read the same rows"


def test_the_fingerprint_depends_on_the_rows_that_the_function_returns(own):
    prompts = build(own("to_row", {"from": "1 + 2", "unused": 1}))
    assert build(own("to_row", {"from": "1 + 2", "unused": 2})).fingerprint == prompts.fingerprint
    assert build(own("to_row", {"from": "1 + 3", "unused": 1})).fingerprint != prompts.fingerprint


def test_a_custom_dataset_class_in_verls_form_reads_the_files(own):
    data = own("Numbers", file="t.txt", text="11 22 33")
    assert check_sources(data, EXACT, 1) is None
    prompts = build(data)
    assert [p.messages for p in prompts] == [[{"role": "user", "content": n}] for n in ("11", "22", "33")]
    assert {(p.ground_truth, p.data_source) for p in prompts} == {("7", "Numbers")}
    assert len(build(own("Numbers", file="t.txt", text="11 22 33", train_max_samples=2))) == 2


def test_data_settings_apply_to_a_custom_dataset_class(own):
    data = own("Numbers", file="t.txt", text="11", system_prompt="Be brief.")
    assert [message["role"] for message in build(data)[0].messages] == ["system", "user"]


def test_errors_of_the_code_name_file_row_and_exception(own, tmp_path):
    data = own("to_row", {"from": "1 + 2"}, {"from": "nobody"})
    says(user_error(build, data), "t.jsonl line 2", "rows.py:to_row", "KeyError", "missing", "line 10 of rows.py")
    says(user_error(build, own("text", {"a": 1})), "t.jsonl line 1", "rows.py:text", "str", "dict")
    says(user_error(build, own("Plain", {"a": 1})), "data.train_files", "row 0", "rows.py:Plain", "list", "dict")
    says(user_error(build, own("Sizes", {"a": 1})), "data.train_files", "row 0", "rows.py:Sizes", "TypeError")
    wrong = own("Numbers", file="t.txt", text="1")
    wrong.max_prompt_length = 65
    says(user_error(build, wrong), "data.train_files", "rows.py:Numbers", "AssertionError", "of rows.py")
    says(user_error(build, own("to_row", text=" ")), "data.train_files", "no rows")


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ("object", "a value of type object"),
        ("key", "a key of type tuple"),
        ("set", "a value of type set"),
        ("itself", "a list or dict that contains itself"),
        ("name", "a column whose name is not a text, 0"),
    ],
)
def test_values_that_differ_in_the_next_process_are_rejected(own, odd, what):
    """Such a run trained and saved, and no later command could resume it; a key ended all attempts."""
    says(user_error(build, own("odd", {"odd": odd})), "t.jsonl line 1", "rows.py:odd", what)


def test_deep_rows_of_the_code_are_rejected(own):
    says(user_error(build, own("odd", {"odd": "deep"})), "t.jsonl line 1", "column 'extra_info' has over 100 levels")


def test_numbers_of_numpy_become_numbers(own):
    assert build(own("odd", {"odd": "numbers"}))[0].extra_info["odd"] == {1: 0.5}


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        (["path=rows.py"], ("data.custom_cls.path=rows.py", "data.custom_cls.name=null", "both")),
        (["path=rows", "name=to_row"], ("data.custom_cls.path=rows", ".py")),
        (["path=rows.py", "name=a b"], ("data.custom_cls.name=a b", "function or class")),
        (["path=rows.py", "name=to_row", "files=null"], ("data.custom_cls.path=rows.py", "data.train_files")),
    ],
)
def test_invalid_settings_of_custom_data_are_rejected(settings, texts):
    files = ["data=reasoning_gym"] if "files=null" in settings else ["data.train_files=t.jsonl"]
    custom = [f"data.custom_cls.{each}" for each in settings if "files" not in each]
    config = compose_config(["recipes=minimal", "model=tiny", *files, *custom], Library.find(None))
    says(user_error(validate, config), *texts)


def test_names_are_checked_before_the_ranks_start(own, tmp_path):
    for name, texts in {
        "to_rows": ("rows.py:to_rows", "to_row?"),
        "two": ("rows.py:two", "a, b", "row"),
    }.items():
        says(user_error(check_sources, own(name, {"from": "1"}), EXACT, 1), "data.custom_cls", *texts)
    missing = own("to_row", {"from": "1"})
    missing.custom_cls.path = str(tmp_path / "row.py")
    says(user_error(check_sources, missing, EXACT, 1), "data.custom_cls", "row.py", "rows.py?")
    gone = own("Numbers", {"a": 1})
    Path(gone.train_files).unlink()
    says(user_error(check_sources, gone, EXACT, 1), "data.train_files", "no such file")
