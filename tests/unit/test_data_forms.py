"""Forms of data files (JSONL, JSON, CSV, with a byte-order mark or without), system prompts, template variables."""

import csv
import json
import time
from pathlib import Path

import pytest

from rlhf.config import DataConfig, RewardConfig
from rlhf.data import PromptSet, build_train_set, cached_prompts, check_sources, sources
from rlhf.errors import UserError
from tests.support.letters import letter_tokenizer, text_of

ROWS = [{"prompt": "1 + 1", "answer": "2"}, {"prompt": 'say "ä",\nplease', "answer": "ä"}]
EXACT = RewardConfig(functions=["exact_match"])
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}{{ 'think' if enable_thinking else '' }}>"
)


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer(TEMPLATE)


def build(path: Path, tokenizer, **settings) -> PromptSet:
    return build_train_set(DataConfig(train_files=str(path), **settings), EXACT, 1, tokenizer)


def error_message(path: Path) -> str:
    with pytest.raises(UserError) as raised:
        check_sources(DataConfig(train_files=str(path)), EXACT, 1)
    return str(raised.value).removeprefix(f"data.train_files: {path}")


def write(path: Path, mark: str = "") -> Path:
    """Write ROWS in the format of the path's suffix, and return the path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(mark)
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
        elif path.name == "list.json":
            json.dump(ROWS, file, indent=2)
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    return path


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte-order mark"])
@pytest.mark.parametrize("name", ["rows.jsonl", "list.json", "lines.json", "rows.csv"])
def test_every_form_gives_the_same_rows(tmp_path, tokenizer, name, mark):
    prompts = build(write(tmp_path / name, mark), tokenizer)
    assert [(p.messages[0]["content"], p.ground_truth) for p in prompts] == [tuple(row.values()) for row in ROWS]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '[{"prompt": "x", "answer": "1"},\n3]',
            " entry 1 is not a JSON object but int. Correct or delete this record.",
        ),
        ("a.json", '[{"prompt": "x",}]', " is not JSON: "),
        (
            "a.json",
            '{"data": [\n]}',
            " contains one dict with data, not a list of rows. Write the rows as a list, or one on",
        ),
        ("a.json", '{"prompt": "x", "answer": "1"}\n{"prompt" "x"}', " line 2 is not JSON: "),
        ("a.csv", "prompt,answer\nx,1\ny,2,3\n", " line 3 has 3 values for 2 columns (prompt, answer). Put texts with"),
        ("a.csv", "prompt;answer\nx;1\n", ": columns are separated by ';'. Write the file with commas."),
        ("a.csv", "prompt,answer,answer\n", ": two columns are called 'answer'."),
        ("a.csv", 'prompt,answer\n"x"y,1\n', " line 2 is not CSV: "),
        (
            "a.csv",
            "prompt,answer\nx,\n",
            " line 2: the reference answer, column 'answer', is null or blank in this row. Fill it in",
        ),
        (
            "a.jsonl",
            '{"prompt": "x", "answer": null}',
            " line 1: the reference answer, column 'answer', is null or blank in",
        ),
        (
            "a.jsonl",
            '{"prompt": "x", "reward_model": {}}',
            " line 1: the reference answer, column 'reward_model.ground_t",
        ),
        (
            "a.jsonl",
            '{"prompt": null, "answer": "1"}',
            " line 1: column 'prompt' (data.prompt_key) is null in this row",
        ),
        ("a.jsonl", '{"prompt": "x", "answer": "1"}\n{oh', " line 2 is not JSON: "),
        ("a.jsonl", '{"prompt": "x", "answer": ' + "[" * 100_000, " line 1 is not JSON: maximum recursion depth"),
        ("a.json", "[" * 100_000, " is not JSON: maximum recursion depth"),
        ("a.json", '{"prompt": ' * 100_000, " line 1 is not JSON: maximum recursion depth"),
        ("a.jsonl", '{"prompt": "x", "answer": ' + "9" * 5000 + "}", " line 1 is not JSON: Exceeds the limit"),
        (
            "a.jsonl",
            '{"prompt": "x", "answer": {"value": 1}}',
            " line 1: the reference answer is a mapping with value, and",
        ),
        ("a.parquet", '{"prompt": "x", "answer": "1"}', " is not a parquet file. Rename it to .jsonl."),
        (
            "a.jsonl",
            '{"prompt": " ", "answer": "1"}',
            " line 1: column 'prompt' (data.prompt_key) has an empty prompt in",
        ),
        (
            "a.jsonl",
            '{"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "\\n"}], "answer": "1"}',
            " line 1: column 'prompt' (data.prompt_key) has an empty prompt in this row. Fill it in, or delete the",
        ),
    ],
)
def test_mistakes_in_data_files_name_file_and_line_before_loading(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    assert error_message(path).startswith(message)


@pytest.mark.parametrize(("start", "name"), [(b"PAR1\xff", ".parquet"), (b"\x1f\x8b\xff", ".gz")])
def test_a_parquet_or_gzip_file_named_jsonl_is_rejected(tmp_path, start, name):
    (path := tmp_path / "a.jsonl").write_bytes(start)
    assert error_message(path) == f" is a {name} file, not text. Rename or unpack it."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("https://example.com/a.jsonl", "URLs are not supported. Download the file, and set its local path."),
        ("s3://bucket/a.parquet", "URLs are not supported."),
        ("{folder}/a.jsonl.gz", "a.jsonl.gz is compressed. Unpack it."),
    ],
)
def test_urls_and_compressed_data_files_are_rejected(tmp_path, name, message):
    (tmp_path / "a.jsonl.gz").touch()
    files = name.format(folder=tmp_path)
    with pytest.raises(UserError) as raised:
        check_sources(DataConfig(train_files=files), EXACT, 1)
    assert str(raised.value).startswith(f"data.train_files={files}: {message}")


def test_rows_beyond_train_max_samples_are_not_checked(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answer": "1"}\n' * 3 + "{oh\n")
    assert error_message(path).startswith(" line 4 is not JSON")
    check_sources(DataConfig(train_files=str(path), train_max_samples=3), EXACT, 1)


def test_the_early_check_of_a_long_file_has_a_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "EARLY_CHECK_S", 0.05)
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answer": "1"}\n' * 200_000)
    before = time.process_time()
    check_sources(DataConfig(train_files=str(path)), EXACT, 1)
    assert time.process_time() - before < 0.3


def test_a_system_prompt_is_for_rows_without_one(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in ("a", own)))
    prompts = build(path, tokenizer, system_prompt="be brief")
    assert [text_of(p) for p in prompts] == ["s:be brief;u:a;>", "s:own;u:b;>"]
    assert prompts.fingerprint != build(path, tokenizer).fingerprint


def test_a_symlink_to_a_data_file_gives_the_same_prompts(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl")
    (tmp_path / "link.jsonl").symlink_to(path)
    (tmp_path / "blob").write_bytes(path.read_bytes())
    (tmp_path / "named.jsonl").symlink_to(tmp_path / "blob")
    prompts = build(tmp_path / "link.jsonl", tokenizer)
    assert prompts[0].data_source == "rows"
    assert prompts.fingerprint == build(path, tokenizer).fingerprint
    assert build(tmp_path / "named.jsonl", tokenizer)[0].data_source == "named"


def test_variables_reach_the_template(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl")
    assert text_of(build(path, tokenizer)[0]) == "u:1 + 1;>"
    assert text_of(build(path, tokenizer, apply_chat_template_kwargs={"enable_thinking": True})[0]) == "u:1 + 1;think>"
    with pytest.raises(UserError, match=r"apply_chat_template_kwargs.thinking=1: has no effect"):
        build(path, tokenizer, apply_chat_template_kwargs={"thinking": 1})


def test_system_prompt_and_template_variables_are_part_of_the_cache_key(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(cached_prompts, "LARGE", 1)
    path, folder = write(tmp_path / "rows.jsonl"), tmp_path / "cache"
    ways = [{}, {"system_prompt": "a"}, {"apply_chat_template_kwargs": {"enable_thinking": True}}]
    made = [text_of(build(path, tokenizer, cache_dir=str(folder), **way)[0]) for way in ways]
    assert made == ["u:1 + 1;>", "s:a;u:1 + 1;>", "u:1 + 1;think>"]
    assert len([each for each in folder.iterdir() if each.is_dir() and each.name != "files"]) == 3


def test_a_syntax_error_in_a_chat_template_names_the_model_and_not_a_prompt(tmp_path, tokenizer):
    broken = letter_tokenizer("{% for m in messages %}\n{{ m }")
    with pytest.raises(
        UserError, match=r"^model.path=some/model: its chat template .*, line 2, is not valid: unexpected"
    ):
        build(write(tmp_path / "rows.jsonl"), broken)
