"""Cache of tokenized prompts: the same prompts bit for bit, made once, despite kills and concurrent processes."""

import datetime
import json
import logging
import math
import os
import signal
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.config import DataConfig, RewardConfig
from rlhf.config.library import PACKAGE
from rlhf.data import PromptSet, PromptStream, build_train_set, cached_prompts, prompt_cache
from rlhf.errors import UserError
from rlhf.models.loading import ModelSource, load_tokenizer
from tests.support.letters import TEMPLATE, letter_tokenizer
from tests.support.small_disks import small_disk

REWARDS = RewardConfig(functions=["exact_match"])
DAY = datetime.date(2026, 3, 14)


class Counting:
    """A tokenizer that counts its calls for tokens and calls `at_call` with each call's number."""

    def __init__(self, at_call: Callable[[int], None] = lambda _: None) -> None:
        self._tokenizer, self._at_call = letter_tokenizer(), at_call
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, *arguments, **named) -> object:
        if named.get("tokenize", True):
            self.calls += 1
            self._at_call(self.calls)
        return self._tokenizer.apply_chat_template(*arguments, **named)


@pytest.fixture(autouse=True)
def cache_every_prompt_set(monkeypatch):
    monkeypatch.setattr(cached_prompts, "LARGE", 1)
    monkeypatch.setattr(cached_prompts, "SETTLED_NS", 0)


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def jsonl(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(path: Path, count: int) -> str:
    return jsonl(path, *({"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(count)))


def build(files: str | list[str], cache: Path | None, tokenizer=None, reward=REWARDS, **settings) -> PromptSet:
    data = DataConfig(train_files=files, cache_dir=None if cache is None else str(cache), **settings)
    return build_train_set(data, reward, 1, tokenizer or letter_tokenizer())


def sets(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir() and path.name != "files"]


def test_columns_for_rewards_are_cached_by_what_the_functions_read(tmp_path, cache, monkeypatch):
    (tmp_path / "rewards.py").write_text("def one(solution_str, level): ...\ndef all(completions, **kwargs): ...\n")
    files = jsonl(tmp_path / "t.jsonl", *({"prompt": "p", "answer": "a", "level": i, "b": [i]} for i in range(3)))
    rewards = [RewardConfig(functions=[f"{tmp_path}/rewards.py:{name}"]) for name in ("one", "all")]
    cached = [build(files, cache, reward=reward) for reward in (REWARDS, *rewards)]
    assert len(sets(cache)) == 3
    assert [prompts[2].columns for prompts in cached] == [
        {},
        {"level": 2},
        {"answer": "a", "level": 2, "b": [2], "prompt": "p"},
    ]
    monkeypatch.setattr(cached_prompts, "LARGE", 1 << 40)
    for prompts, reward in zip(cached, (REWARDS, *rewards), strict=True):
        plain = build(files, None, reward=reward)
        assert (list(map(repr, prompts)), prompts.fingerprint) == (list(map(repr, plain)), plain.fingerprint)


@pytest.mark.parametrize("overlong", ["filter", "left", "right", "middle"])
def test_cached_prompts_are_those_in_memory(tmp_path, cache, overlong, caplog, monkeypatch):
    many = numbered(tmp_path / "many.jsonl", 2100)
    odd = jsonl(
        tmp_path / "odd.jsonl",
        {"prompt": "é \u0000", "answer": ["a", 1, 2.5, None, True, "\ud800"]},
        {"prompt": [{"role": "user", "content": "x" * 50, "name": "n"}], "reward_model": {"ground_truth": 1e300}},
        {"prompt": "?", "answer": math.inf, "extra_info": {"a": {"b": [1, {"c": -0.0}]}, "": 10**30}},
    )
    columns = {"prompt": "p", "reward_model": {"ground_truth": ["1"], "style": None}, "extra_info": {"x": [0.1, None]}}
    pq.write_table(pa.Table.from_pylist([columns | {"data_source": "d"}] * 3), tmp_path / "table.parquet")
    files, settings = (
        [many, odd, str(tmp_path / "table.parquet")],
        {"max_prompt_length": 20, "overlong_prompts": overlong},
    )
    cached = [build(files, cache, **settings) for _ in range(2)]
    assert len(sets(cache)) == 1
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    monkeypatch.setattr(cached_prompts, "LARGE", 1 << 40)
    plain = build(files, None, **settings)
    for prompts in cached:
        assert list(map(repr, prompts)) == list(map(repr, plain))
        assert (len(prompts), prompts.fingerprint) == (len(plain), plain.fingerprint)
        assert (prompts.dropped, prompts.truncated) == (plain.dropped, plain.truncated)
    assert {"filter": plain.dropped}.get(overlong, plain.truncated) == 1
    assert len(set(warnings)) == 1
    assert len(warnings) == 2, "at each start"
    streams = [PromptStream(prompts, seed=3, shuffle=True) for prompts in (*cached, plain)]
    assert streams[0].next(4300) == streams[1].next(4300) == streams[2].next(4300)


def test_tokenizing_is_logged_before_it_begins(tmp_path, cache, caplog):
    file = numbered(tmp_path / "rows.jsonl", 2000)
    with caplog.at_level(logging.INFO, logger="rlhf"):
        build(file, cache)
        build(file, cache)
    logged = [message for message in caplog.messages if "okeniz" in message]
    assert [message.split()[0] for message in logged] == ["Tokenizing", "Tokenized"]


def test_a_later_start_neither_tokenises_nor_reads_the_rows(tmp_path, cache):
    long = {"answer": "1", "extra_info": {"solution": "so " * 200}}
    file = jsonl(tmp_path / "rows.jsonl", *({"prompt": f"{i} + 1"} | long for i in range(5000)))
    size = (tmp_path / "rows.jsonl").stat().st_size
    first = build(file, cache, Counting())

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    tokenizer = Counting()
    before = bytes_read()
    tracemalloc.start()
    again = build(file, cache, tokenizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tokenizer.calls, again.fingerprint) == (0, first.fingerprint)
    assert bytes_read() - before < size / 4
    assert peak < size / 4


def test_every_input_of_the_prompts_is_in_the_cache_key(tmp_path, cache):
    path = tmp_path / "rows.jsonl"
    file = numbered(path, 100)
    other = numbered(tmp_path / "other.jsonl", 100)
    variants: list[Callable[[], PromptSet]] = [
        lambda: build(file, cache),
        lambda: build(file, cache, letter_tokenizer(TEMPLATE + "!")),
        lambda: build(file, cache, max_prompt_length=7),
        lambda: build(file, cache, max_prompt_length=7, overlong_prompts="left"),
        lambda: build(file, cache, train_max_samples=50),
        lambda: build(other, cache),  # of the same content, but another data_source
        lambda: build([file, other], cache),
    ]
    found = [[list(variant()), len(sets(cache))] for variant in variants]
    assert [count for _, count in found] == list(range(1, len(variants) + 1))
    assert [list(variant()) for variant in variants] == [prompts for prompts, _ in found]
    assert len(sets(cache)) == len(variants)
    with pytest.raises(UserError, match="reference answer is missing"):
        build(jsonl(tmp_path / "bare.jsonl", {"prompt": "x"}), cache)


def test_a_changed_file_is_seen_though_its_size_and_time_are_the_same(tmp_path, cache):
    path = tmp_path / "rows.jsonl"
    file = numbered(path, 100)
    first = build(file, cache)
    stat = path.stat()
    time.sleep(0.1)  # so that the inode's change time differs: the clock ticks at least every 0.01 s
    path.write_text(path.read_text().replace("99 + 1", "98 + 2"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = build(file, cache)
    assert changed.fingerprint != first.fingerprint
    assert changed[99].messages[0]["content"] == "98 + 2"


def test_the_hash_of_a_recently_changed_file_is_not_cached(tmp_path, cache, monkeypatch):
    monkeypatch.undo()
    path = Path(numbered(tmp_path / "rows.jsonl", 100))
    found = cached_prompts.file_hash(path, cache)
    assert not cache.exists()
    monkeypatch.setattr(cached_prompts, "SETTLED_NS", 0)
    assert cached_prompts.file_hash(path, cache) == found
    assert len(list((cache / "files").iterdir())) == 1


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, cache):
    path = tmp_path / "rows.jsonl"
    file = numbered(path, 100)

    def append(_: int) -> None:
        with path.open("a") as rows:
            rows.write('{"prompt": "late", "answer": "1"}\n')

    with pytest.raises(UserError, match=r"data\.train_files: a file changed while it was read"):
        build(file, cache, Counting(append))
    assert sets(cache) == []


def test_only_a_template_that_prints_the_date_has_an_entry_per_day(tmp_path, cache):
    data = DataConfig(train_files=numbered(tmp_path / "rows.jsonl", 100), cache_dir=str(cache))
    days = [DAY, DAY + datetime.timedelta(days=1)]
    for template, count in ((TEMPLATE, 1), (TEMPLATE + "{{ strftime_now('%d') }}", 3)):
        tokenizer = letter_tokenizer(template)
        hashes = {build_train_set(data, REWARDS, 1, tokenizer, day).tokens_fingerprint for day in days}
        assert len(sets(cache)) == count
        assert len(hashes) == (count + 1) // 2


def in_children(count: int, action: Callable[[], None]) -> list[int]:
    """Run `action` in so many forked processes at once; returns their exit statuses, signals as negative numbers."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                action()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_a_killed_build_leaves_no_usable_entry(tmp_path, cache):
    file = numbered(tmp_path / "rows.jsonl", 5000)

    def die(call: int) -> None:
        if call == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_children(1, lambda: build(file, cache, Counting(die))) == [-signal.SIGKILL]
    (left,) = sets(cache)
    assert left.startswith(".tmp-")
    assert (cache / left / "prompts.arrow").stat().st_size > 0
    assert len(build(file, cache, Counting())) == 5000
    (made,) = sets(cache)
    assert not made.startswith(".")


def test_concurrent_processes_build_an_entry_once(tmp_path, cache):
    file = numbered(tmp_path / "rows.jsonl", 4000)
    calls = tmp_path / "calls"

    def note(_: int) -> None:
        with calls.open("a") as lines:
            lines.write("x")
        time.sleep(0.05)

    def start() -> None:
        assert len(build(file, cache, Counting(note))) == 4000

    assert in_children(3, start) == [0, 0, 0]
    assert len(calls.read_text()) == 4, "four batches of 1000"
    assert len(sets(cache)) == 1


def test_another_process_builds_the_entry_if_its_builder_is_killed(tmp_path, cache):
    file = numbered(tmp_path / "rows.jsonl", 3000)
    killed = tmp_path / "killed"

    def die_once(call: int) -> None:
        if call == 2 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert sorted(in_children(2, lambda: build(file, cache, Counting(die_once)))) == [-signal.SIGKILL, 0]
    assert len(build(file, cache, Counting(lambda _: pytest.fail("it is there")))) == 3000


def test_waiting_for_a_stalled_builder_ends_with_an_error(tmp_path, cache, monkeypatch):
    file = numbered(tmp_path / "rows.jsonl", 100)
    monkeypatch.setattr(prompt_cache, "STALLED_S", 0.3)
    rejected = []

    def wait(_: int) -> None:
        with pytest.raises(UserError, match=r"data\.cache_dir=.*has written nothing for 0\.3 s.*fuser"):
            build(file, cache, Counting())
        rejected.append(True)

    build(file, cache, Counting(wait))
    assert rejected == [True]


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    file = numbered(tmp_path / "rows.jsonl", 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError,
        match=r"data\.cache_dir=.*cannot store the tokenized prompts there \(Not a directory\)\. Free disk space",
    ):
        build(file, tmp_path / "file" / "cache")


def test_leftovers_that_cannot_be_removed_stop_nobody(tmp_path, cache):
    file = numbered(tmp_path / "rows.jsonl", 100)
    first = build(file, cache)
    made = cache / sets(cache)[0]
    (made / "about.json").write_text("{}")
    (killed := cache / f".tmp-{made.name}-killed").mkdir()
    with small_disk(killed / "busy", 1):
        assert build(file, cache).fingerprint == first.fingerprint


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another user here, who may not read all")
def test_an_entry_of_another_user_is_one_message():
    with tempfile.TemporaryDirectory() as folder:  # other users may not enter pytest's folders
        Path(folder).chmod(0o755)
        (Path(folder) / "key").mkdir(mode=0)
        os.seteuid(65534)
        try:
            with pytest.raises(UserError, match=rf"data\.cache_dir={folder}: no permission to read .*"):
                prompt_cache.open_or_make(Path(folder), "key", lambda _: None)
        finally:
            os.seteuid(0)


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path):
    file = numbered(tmp_path / "rows.jsonl", 30_000)
    with small_disk(tmp_path / "disk", 1) as disk:
        with pytest.raises(
            UserError, match=r"data\.cache_dir=.*cannot store the tokenized prompts there \(No space left on device\)"
        ):
            build(file, disk / "cache")
        assert sets(disk / "cache") == []


def test_a_cache_on_a_read_only_disk_is_read_but_not_extended(tmp_path):
    file, other = numbered(tmp_path / "rows.jsonl", 100), numbered(tmp_path / "other.jsonl", 100)
    with small_disk(tmp_path / "disk", 1) as disk:
        first = build(file, disk / "cache")
        for path in (disk / "cache").glob("*.lock"):
            path.unlink()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert build(file, disk / "cache").fingerprint == first.fingerprint
        with pytest.raises(
            UserError, match=r"data\.cache_dir=.*cannot store the tokenized prompts there \(Read-only file system\)"
        ):
            build(other, disk / "cache")


@pytest.mark.parametrize("name", ["prompts.arrow", "about.json"])
def test_a_truncated_cache_file_is_rebuilt(tmp_path, cache, name, caplog):
    file = numbered(tmp_path / "rows.jsonl", 100)
    first = build(file, cache)
    (entry,) = sets(cache)
    path = cache / entry / name
    path.write_bytes(path.read_bytes()[:-20])
    assert build(file, cache).fingerprint == first.fingerprint
    assert "The prompts are tokenized again" in caplog.text
    assert sets(cache) == [entry]


def test_a_damaged_byte_is_never_trained_on(tmp_path, cache):
    rows = 30
    file = numbered(tmp_path / "rows.jsonl", rows)
    first = list(build(file, cache))
    (entry,) = sets(cache)
    path = cache / entry / "prompts.arrow"
    whole = path.read_bytes()
    rejected = 0
    for position in range(0, len(whole), 31):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with suppress(UserError):
            assert list(build(file, cache)) == first
            continue
        rejected += 1
        with pytest.raises(UserError, match=r"is damaged on the disk\. Delete the folder"):
            list(build(file, cache))
    assert rejected > rows / 2
    assert sets(cache) == [entry]


def test_values_that_json_lacks_stay_in_memory(tmp_path, cache, caplog):
    day = datetime.date(2026, 1, 2)
    table = pa.Table.from_pylist([{"prompt": "p", "answer": "a", "extra_info": {"day": day}}] * 3)
    pq.write_table(table, tmp_path / "table.parquet")
    for _ in range(2):
        prompts = build(str(tmp_path / "table.parquet"), cache)
        assert [prompt.extra_info for prompt in prompts] == [{"day": day}] * 3
        assert (
            "row 0 has a value of type date, which JSON cannot represent, so every rank stores all prompts"
            in caplog.text
        )
        caplog.clear()


def test_a_small_set_uses_no_cache(tmp_path, cache, monkeypatch):
    monkeypatch.undo()
    assert len(build(numbered(tmp_path / "rows.jsonl", 100), cache)) == 100
    assert not cache.exists()


def test_a_tokenizer_that_is_loaded_again_has_the_same_identity():
    folder = PACKAGE / "models" / "tiny_policy"
    first, second = (load_tokenizer(ModelSource("model.path", str(folder)), folder) for _ in range(2))
    assert cached_prompts.tokenizer_identity(first, DAY) == cached_prompts.tokenizer_identity(second, DAY)


def test_the_datasets_library_reads_the_cache_file(tmp_path, cache):
    prompts = build(numbered(tmp_path / "rows.jsonl", 1500), cache)
    (entry,) = sets(cache)
    table = datasets.Dataset.from_file(str(cache / entry / "prompts.arrow"))
    assert table[1234]["token_ids"] == prompts[1234].token_ids


def test_the_default_folder_lies_in_the_cache_of_hugging_face(monkeypatch, tmp_path):
    for name in ("HF_DATASETS_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prompt_cache.cache_folder(None) == tmp_path / ".cache" / "huggingface" / "datasets" / "rlhf_prompts"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert prompt_cache.cache_folder(None) == tmp_path / "home" / "datasets" / "rlhf_prompts"
    assert prompt_cache.cache_folder("~/mine") == tmp_path / "mine"
