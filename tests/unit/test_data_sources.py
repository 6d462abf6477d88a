"""Sources of prompts: real files and reasoning-gym tasks, and one clear error for each possible mistake."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.config import Config, DataConfig, EnvConfig, ReasoningGymConfig, RewardConfig, TrainerConfig
from rlhf.data import build_train_set, build_val_set, check_sources
from rlhf.errors import UserError
from tests.support.refusals import says, user_error

VERL = {
    "data_source": "gsm",
    "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 7},
}
PLAIN = {"prompt": "2 + 2", "answer": "4"}


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    made.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}A"
    return made


def config_of(train=None, val=None, *, reward="exact_match", function=None, seed=1, gym=None, **data) -> Config:
    return Config(
        trainer=TrainerConfig(seed=seed),
        data=DataConfig(train_files=train, val_files=val, reasoning_gym=gym or ReasoningGymConfig(), **data),
        reward=RewardConfig(functions=[function or reward]),
    )


def sections(config: Config) -> tuple[DataConfig, RewardConfig, int]:
    """Return the sections and the seed from which prompt sets are built."""
    return config.data, config.reward, config.trainer.seed


def jsonl(path: Path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, *rows) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def fails(config: Config, tokenizer, *parts: str, checked: bool = True) -> None:
    """Check that the build and, if `checked`, the early check raise an error whose message has all `parts`."""
    calls = [lambda: build_train_set(*sections(config), tokenizer)] + (
        [lambda: check_sources(*sections(config))] if checked else []
    )
    for call in calls:
        with pytest.raises(UserError) as caught:
            call()
        missing = [part for part in parts if part not in str(caught.value)]
        assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_rows_with_verl_columns_or_plain_pairs_are_read(tmp_path, tokenizer, write):
    verl = write(tmp_path / f"verl.{write.__name__}", VERL)
    plain = write(tmp_path / f"plain.{write.__name__}", PLAIN, PLAIN | {"prompt": "3 + 3", "answer": "6"})
    config = config_of([verl, plain])
    check_sources(*sections(config))
    prompts = build_train_set(*sections(config), tokenizer)
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert prompts[0].messages == VERL["prompt"]
    assert (prompts[0].data_source, prompts[0].ground_truth, prompts[0].extra_info) == ("gsm", "2", {"index": 7})
    assert prompts[1].messages == [{"role": "user", "content": "2 + 2"}]
    assert (prompts[1].data_source, prompts[2].ground_truth, prompts[1].extra_info) == ("plain", "6", {})
    assert len(prompts[1].token_ids) == len("user2 + 2A")
    assert build_val_set(*sections(config), tokenizer) is None


def test_one_jsonl_file_may_mix_both_forms(tmp_path, tokenizer):
    prompts = build_train_set(*sections(config_of(jsonl(tmp_path / "mixed.jsonl", VERL, "", PLAIN))), tokenizer)
    assert [prompt.ground_truth for prompt in prompts] == ["2", "4"]


def test_globs_in_sorted_order_keys_and_limits(tmp_path, tokenizer):
    for name in ("b", "a", "c"):
        parquet(tmp_path / f"{name}.parquet", {"question": name, "solution": name.upper(), "unused": 1})
    pattern = str(tmp_path / "*.parquet")
    config = config_of(pattern, pattern, prompt_key="question", answer_key="solution", train_max_samples=2)
    check_sources(*sections(config))
    assert [prompt.ground_truth for prompt in build_train_set(*sections(config), tokenizer)] == ["A", "B"]
    assert [prompt.ground_truth for prompt in build_val_set(*sections(config), tokenizer)] == ["A", "B", "C"]


def test_a_custom_reward_function_needs_no_reference_answers(tmp_path, tokenizer):
    (tmp_path / "rewards.py").write_text("def funny(solution_str): return 1")
    config = config_of(jsonl(tmp_path / "p.jsonl", {"prompt": "tell a joke"}), function=f"{tmp_path}/rewards.py:funny")
    assert build_train_set(*sections(config), tokenizer)[0].ground_truth is None


REWARDS = """
from os import path as imported

def verl(data_source, solution_str, ground_truth, extra_info, **kwargs): ...
def named(solution_str, prompt, level, hint=None): ...
def by_key(solution_str, question): ...
def trl(completions, **kwargs): ...
def trl_named(completions, level): ...
"""
LEVELS = [
    {"question": "1 + 1", "answer": "2", "level": 3, "other": "x"},
    {"question": "2 + 2", "answer": "4", "level": None},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("function", "columns"),
    [
        ("verl", {}),
        ("named", {"prompt": "1 + 1", "level": 3}),
        ("by_key", {"question": "1 + 1"}),
        ("trl", {"prompt": "1 + 1", "answer": "2", "level": 3, "other": "x"}),
        ("trl_named", {"prompt": "1 + 1", "level": 3}),
        ("imported", {"prompt": "1 + 1", "answer": "2", "level": 3, "other": "x"}),
    ],
)
def test_columns_that_a_function_reads_are_in_the_prompt(tmp_path, tokenizer, kind, function, columns):
    (tmp_path / "rewards.py").write_text(REWARDS)
    path = {"jsonl": jsonl, "parquet": parquet}[kind](tmp_path / f"t.{kind}", *LEVELS)
    config = config_of(path, function=f"{tmp_path}/rewards.py:{function}", prompt_key="question")
    check_sources(*sections(config))
    prompts = build_train_set(*sections(config), tokenizer)
    assert prompts[0].columns == columns
    without = build_train_set(*sections(config_of(path, prompt_key="question")), tokenizer)
    assert (prompts.fingerprint == without.fingerprint) == (not columns)
    assert prompts[0].token_ids == without[0].token_ids


def test_a_missing_column_of_a_reward_function_names_row_and_column(tmp_path, tokenizer):
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = config_of(jsonl(tmp_path / "t.jsonl", PLAIN | {"levels": 1}), function=f"{tmp_path}/rewards.py:named")
    expected = (
        "t.jsonl line 1: reward.functions=",
        "named takes level",
        "Its columns: prompt, answer, levels",
        "Did you mean levels?",
    )
    fails(config, tokenizer, *expected)
    config.reward.kwargs = {"level": 1}
    assert build_train_set(*sections(config), tokenizer)[0].columns == {"prompt": "2 + 2"}
    config = config_of(
        jsonl(tmp_path / "t.jsonl", PLAIN | {"level": 1}, PLAIN), function=f"{tmp_path}/rewards.py:named"
    )
    fails(config, tokenizer, "t.jsonl line 2", checked=False)


ENVIRONMENTS = """
class Shop:
    def reset(self, budget, *, colour, seed, prompt, data_source, ground_truth, note=None): ...
class Asks:
    def reset(self, /, question: str, **row): ...
class Free:
    def reset(self, **row): ...
"""


def env_of(folder: Path, *names: str) -> EnvConfig:
    (folder / "envs.py").write_text(ENVIRONMENTS)
    return EnvConfig(classes=[f"{folder}/envs.py:{name}" for name in names])


def test_a_missing_column_of_a_reset_is_found_before_the_models_load(tmp_path, tokenizer):
    """Such a run failed all samples of its first step, with a traceback and advice on slow environments."""
    row = PLAIN | {"budget": 3, "color": "red"}
    config, env = config_of(jsonl(tmp_path / "t.jsonl", row)), env_of(tmp_path, "Shop")
    for check in (partial(check_sources, env=env), partial(build_train_set, tokenizer=tokenizer, env=env)):
        message = user_error(check, *sections(config))
        says(message, f"t.jsonl line 1: env.classes={tmp_path}/envs.py:Shop: reset takes colour, but the row has no")
        says(message, "Its columns: prompt, answer, budget, color.", "Did you mean color?", "give the parameter colour")
    full = PLAIN | {"budget": 3, "extra_info": {"colour": "red"}}
    check_sources(*sections(config_of(jsonl(tmp_path / "t.jsonl", full))), env)
    config = config_of(jsonl(tmp_path / "t.jsonl", full), jsonl(tmp_path / "v.jsonl", row))
    says(user_error(check_sources, *sections(config), env), "v.jsonl line 1", "colour")
    config = config_of([jsonl(tmp_path / "t.jsonl", full), jsonl(tmp_path / "u.jsonl", full, row)])
    says(user_error(check_sources, *sections(config), env), "u.jsonl line 2", "colour")


def test_each_row_needs_the_columns_of_its_own_class(tmp_path):
    env = env_of(tmp_path, "Shop", "Free")
    free, shop = (PLAIN | {"environment": name} for name in ("Free", "Shop"))
    check_sources(*sections(config_of(jsonl(tmp_path / "t.jsonl", free))), env)
    message = user_error(check_sources, *sections(config_of(jsonl(tmp_path / "t.jsonl", free, shop))), env)
    says(message, "line 2", "Shop: reset takes budget")


def test_a_reset_receives_the_prompt_by_the_name_of_its_column(tmp_path, tokenizer):
    path = jsonl(tmp_path / "t.jsonl", {"question": "2 + 2", "answer": "4"})
    config = config_of(path, prompt_key="question")
    rows = build_train_set(*sections(config), tokenizer, env=env_of(tmp_path, "Asks"))
    assert rows[0].columns["question"] == "2 + 2"


def test_generated_problems_lack_columns_before_the_models_load(tmp_path):
    config = config_of(reward="reasoning_gym")
    check_sources(*sections(config), env_of(tmp_path, "Asks"))
    says(user_error(check_sources, *sections(config), env_of(tmp_path, "Shop")), "reset takes budget", "none")
    says(user_error(check_sources, *sections(config), env_of(tmp_path, "Free", "Asks")), "no column environment")
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = config_of(function=f"{tmp_path}/rewards.py:named")
    says(user_error(check_sources, *sections(config)), "named takes level", "none")


def test_missing_file_names_the_nearest(tmp_path, tokenizer):
    jsonl(tmp_path / "train.jsonl", PLAIN)
    fails(
        config_of(f"{tmp_path}/trian.jsonl"), tokenizer, "data.train_files=", "trian.jsonl", "Did you mean train.jsonl"
    )
    fails(config_of(f"{tmp_path}/nowhere/train.jsonl"), tokenizer, "no such file", f"no folder {tmp_path}/nowhere")


def test_glob_without_match_folder_and_extension(tmp_path, tokenizer):
    fails(config_of(f"{tmp_path}/*.parquet"), tokenizer, "data.train_files=", "matches no file")
    fails(config_of(str(tmp_path)), tokenizer, "is a folder", "/*.parquet")
    (tmp_path / "data.tsv").write_text("prompt\tanswer\n")
    fails(config_of(f"{tmp_path}/data.tsv"), tokenizer, "data.tsv is not one of .parquet, .jsonl, .json, .csv")


@pytest.mark.parametrize("value", [[], "", 3, [3]])
def test_train_files_must_be_names(tokenizer, value):
    fails(config_of(value), tokenizer, f"data.train_files={value!r}", "non-empty list")


def test_corrupt_parquet(tmp_path, tokenizer):
    path = Path(parquet(tmp_path / "cut.parquet", *[PLAIN] * 50))
    path.write_bytes(path.read_bytes()[:-20])
    fails(config_of(str(path)), tokenizer, "data.train_files", "cut.parquet", "cannot be read as parquet")


def test_corrupt_parquet_pages(tmp_path, tokenizer):
    path = Path(parquet(tmp_path / "flipped.parquet", *[PLAIN] * 50))
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
    fails(config_of(str(path)), tokenizer, "flipped.parquet", "cannot be read as parquet")


def test_corrupt_jsonl_names_the_line(tmp_path, tokenizer):
    path = jsonl(tmp_path / "bad.jsonl", PLAIN, '{"prompt": ', PLAIN)
    fails(config_of(path), tokenizer, f"{path} line 2", "is not JSON", checked=False)
    fails(config_of(jsonl(tmp_path / "list.jsonl", "[1]")), tokenizer, "line 1", "not a JSON object but list")
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(PLAIN).encode() + b'\n{"prompt": "\xe9"}\n')
    fails(config_of(f"{tmp_path}/latin.jsonl"), tokenizer, "latin.jsonl line 2 is not UTF-8", "iconv -f latin1")


def test_a_chosen_answer_column_comes_before_verls(tmp_path, tokenizer):
    row = {"prompt": "1", "reward_model": {"ground_truth": "verl"}, "answer": "default", "label": "chosen"}
    for key, truth in (("answer", "verl"), ("label", "chosen"), ("absent", "verl")):
        path = jsonl(tmp_path / f"{key}.jsonl", row)
        prompts = build_train_set(*sections(config_of(path, answer_key=key)), tokenizer)
        assert prompts[0].ground_truth == truth


def test_missing_columns(tmp_path, tokenizer):
    for write, name in ((jsonl, "q.jsonl"), (parquet, "q.parquet")):
        path = write(tmp_path / name, {"promt": "1", "answer": "2", "id": 3})
        fails(config_of(path), tokenizer, name, "'prompt' (data.prompt_key)", "promt, answer, id", ".prompt_key=promt")
        path = write(tmp_path / f"a{name}", {"prompt": "1", "answers": "2"})
        fails(config_of(path), tokenizer, name, "no column 'answer' (data.answer_key)", "data.answer_key=answers")
        own = config_of(path, reward="reward_model", answer_key="label")
        fails(own, tokenizer, name, "no column 'label' (data.answer_key)")
        path = write(tmp_path / f"e{name}", {"prompt": "1", "answer": None})
        fails(config_of(path), tokenizer, name, "the reference answer, column ", " is null or blank in this row")
        for number, blank in enumerate(("", " ", [])):
            path = write(tmp_path / f"b{number}{name}", {"prompt": "1", "answer": blank})
            fails(config_of(path), tokenizer, name, "the reference answer, column ", " is null or blank in this row")
        path = write(tmp_path / f"n{name}", {"prompt": "1", "answer": float("nan")})
        fails(config_of(path), tokenizer, name, "the reference answer, column ", " is null or blank in this row")


@pytest.mark.parametrize(
    "prompt",
    [3, [], ["hello"], [{"role": "user"}], [{"role": "user", "content": 3}], {"role": "user", "content": "x"}],
)
def test_prompt_cell_of_the_wrong_type(tmp_path, tokenizer, prompt):
    path = jsonl(tmp_path / "p.jsonl", {"prompt": prompt, "answer": "1"})
    fails(config_of(path), tokenizer, "line 1", "'prompt' (data.prompt_key)", "string or a list of {role, content}")


def test_other_cells_of_the_wrong_type(tmp_path, tokenizer):
    fails(config_of(jsonl(tmp_path / "e.jsonl", PLAIN | {"extra_info": "x"})), tokenizer, "line 1: extra_info", "'x'")
    bare = {"prompt": "1", "reward_model": "42"}
    path = jsonl(tmp_path / "r.jsonl", bare)
    fails(config_of(path), tokenizer, "reward_model must be a mapping", "not str: '42'")
    fails(config_of(path, reward="reward_model"), tokenizer, "reward_model must be a mapping", "rename the column")
    fails(config_of(jsonl(tmp_path / "d.jsonl", PLAIN | {"data_source": 3})), tokenizer, "line 1: data_source", "int")


def test_empty_sets(tmp_path, tokenizer):
    fails(config_of(jsonl(tmp_path / "empty.jsonl")), tokenizer, "data.train_files=", "has no rows")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    fails(config_of(f"{tmp_path}/empty.parquet"), tokenizer, "data.train_files=", "has no rows")


def test_mistakes_in_val_files_name_val_files(tmp_path, tokenizer):
    config = config_of(jsonl(tmp_path / "t.jsonl", PLAIN), f"{tmp_path}/v.jsonl")
    with pytest.raises(UserError, match=r"data\.val_files=.*no such file"):
        check_sources(*sections(config))
    with pytest.raises(UserError, match=r"data\.val_files=.*no such file"):
        build_val_set(*sections(config), tokenizer)


def test_reward_must_fit_the_data(tmp_path, tokenizer):
    path = jsonl(tmp_path / "t.jsonl", PLAIN)
    fails(config_of(path, reward="reasoning_gym"), tokenizer, "reward.functions=['reasoning_gym']", "Use math_verify")
    row = PLAIN | {"data_source": "reasoning_gym/chain_sums"}
    path = jsonl(tmp_path / "u.jsonl", row)
    fails(config_of(path, reward="reasoning_gym"), tokenizer, "line 1", "Did you mean chain_sum")
    row = row | {"data_source": "reasoning_gym/chain_sum"}
    path = jsonl(tmp_path / "m.jsonl", row)
    fails(config_of(path, reward="reasoning_gym"), tokenizer, "line 1", "extra_info.question")
    path = jsonl(tmp_path / "g.jsonl", row | {"extra_info": {"question": "2 + 2", "metadata": {}}})
    config = config_of(path, reward="reasoning_gym")
    check_sources(*sections(config))
    assert len(build_train_set(*sections(config), tokenizer)) == 1


CHECK_HUB_NAMES = """
import sys
from rlhf.config import DataConfig, RewardConfig
from rlhf.data import check_sources
from rlhf.errors import UserError
for name in sys.argv[1:]:
    try:
        check_sources(DataConfig(train_files=name), RewardConfig(functions=["exact_match"]), 1)
        print("ok")
    except UserError as error:
        print(error)
"""


def check_hub_names(home: Path, *names: str) -> list[str]:
    """Return one answer per name, from a new process, since libraries read the unreachable Hub's address at import."""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(home)}
    command = [sys.executable, "-c", CHECK_HUB_NAMES, *names]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_unreachable_hub_name_fails_fast(tmp_path):
    started = time.monotonic()
    (answer,) = check_hub_names(tmp_path, "some-org/some_set:main@train")
    assert time.monotonic() - started < 60
    for part in (
        "data.train_files=some-org/some_set:main@train",
        "no such local file",
        "Hub cannot be reached",
        "cache",
    ):
        assert part in answer


def test_cached_hub_data_serves_without_the_network(tmp_path):
    import datasets

    path = jsonl(tmp_path / "t.jsonl", PLAIN)
    made = datasets.load_dataset("json", data_files={"train": path, "test": path}, cache_dir=str(tmp_path / "made"))
    # Where `datasets` keeps what it downloaded: <org>___<name>/<config>/<version>/<hash>/<name>-<split>.arrow
    arrow = Path(made["train"].cache_files[0]["filename"])
    cached = tmp_path / "datasets" / "some-org___some_set" / "main" / "0.0.0" / arrow.parent.name
    cached.mkdir(parents=True)
    for split in ("train", "test"):
        arrow.with_name(f"json-{split}.arrow").rename(cached / f"some_set-{split}.arrow")
    info = json.loads(arrow.with_name("dataset_info.json").read_text()) | {
        "config_name": "main",
        "dataset_name": "some_set",
    }
    (cached / "dataset_info.json").write_text(json.dumps(info))
    name = "some-org/some_set"
    whole, with_config, with_split, no_split, no_config = check_hub_names(
        tmp_path, name, f"{name}:main", f"{name}:main@test", f"{name}@nope", f"{name}:other"
    )
    assert whole == with_config == with_split == "ok"
    assert "no split 'nope'; it has train, test" in no_split
    assert "Available configs" in no_config


def test_checking_local_files_loads_no_heavy_library(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", PLAIN)
    code = (
        "import sys\nfrom rlhf.config import *\nfrom rlhf.data import check_sources\n"
        f"check_sources(DataConfig(train_files={path!r}), RewardConfig(functions=['exact_match']), 1)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'reasoning_gym', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reasoning_gym_splits_are_disjoint_and_follow_the_seed(tokenizer):
    gym = ReasoningGymConfig(
        "chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 1}, train_size=300, val_size=60
    )
    config = config_of(gym=gym, reward="reasoning_gym")
    check_sources(*sections(config))
    train, val = build_train_set(*sections(config), tokenizer), build_val_set(*sections(config), tokenizer)
    questions = [prompt.extra_info["question"] for prompt in train]
    held_out = {prompt.extra_info["question"] for prompt in val}
    assert len(val) == 60
    assert 0 < len(train) < 300
    assert not held_out & set(questions)
    assert len(set(questions)) < len(questions), "training questions repeat as the task draws them"
    assert train[0].data_source == "reasoning_gym/chain_sum"
    assert train[0].messages == [{"role": "user", "content": questions[0]}]
    assert build_train_set(*sections(config), tokenizer).fingerprint == train.fingerprint
    other = config_of(gym=gym, reward="reasoning_gym", seed=2)
    assert build_train_set(*sections(other), tokenizer).fingerprint != train.fingerprint
    limited = config_of(gym=gym, reward="reasoning_gym", train_max_samples=7, val_max_samples=5)
    assert [p.index for p in build_train_set(*sections(limited), tokenizer)] == [p.index for p in train][:7]
    assert len(build_val_set(*sections(limited), tokenizer)) == 5


@pytest.mark.parametrize(
    ("gym", "parts"),
    [
        (ReasoningGymConfig("chain_sums"), ("data.reasoning_gym.task=chain_sums", "Did you mean chain_sum")),
        (
            ReasoningGymConfig("chain_sum", {"max_term": 3}),
            ("data.reasoning_gym.config.max_term", "Did you mean max_terms"),
        ),
        (ReasoningGymConfig("chain_sum", {"seed": 3}), ("data.reasoning_gym.config.seed", "trainer.seed")),
        (ReasoningGymConfig("chain_sum", {"min_terms": 9}), ("data.reasoning_gym.config=", "max_terms must be")),
        (
            ReasoningGymConfig("chain_sum", {"min_terms": "x"}),
            ("data.reasoning_gym.config=", "chain_sum rejects these values"),
        ),
        (
            ReasoningGymConfig("composite", {"datasets": [{"name": "chain_sum", "weight": 1}]}),
            ("data.reasoning_gym.config=", "composite rejects these values"),
        ),
    ],
)
def test_bad_reasoning_gym_settings(tokenizer, gym, parts):
    fails(config_of(gym=gym), tokenizer, *parts)


def test_reasoning_gym_without_training_problems_left(tokenizer):
    gym = ReasoningGymConfig("coin_flip", {"min_trials": 1, "max_trials": 1}, train_size=3, val_size=500)
    fails(config_of(gym=gym), tokenizer, "data.reasoning_gym.val_size=500", "cover all 3", checked=False)


@pytest.mark.parametrize("column", ["answer", "other", "prompt"])
@pytest.mark.parametrize("levels", [101, 600, 900])
def test_deep_rows_are_rejected_before_anything_loads(column, levels, tmp_path):
    """Such a row reached the first call of a reward function, which recursed too deeply at each restart."""
    row = json.dumps(PLAIN | {column: 0}).replace(": 0", f": {'[' * levels}{']' * levels}")
    config = config_of(jsonl(tmp_path / "t.jsonl", PLAIN, row), function="math_verify")
    says(user_error(check_sources, config.data, config.reward, 1), "t.jsonl line 2", f"column '{column}' has over 100")


def test_rows_of_many_levels_are_read(tmp_path):
    row = json.dumps(PLAIN | {"extra_info": {"deep": 0}}).replace(": 0", f": {'[' * 98}{']' * 98}")
    config = config_of(jsonl(tmp_path / "t.jsonl", row))
    assert check_sources(config.data, config.reward, 1) is not None
