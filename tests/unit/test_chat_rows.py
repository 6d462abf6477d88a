"""Chats as prompts: a last turn with the answer, ShareGPT's layout, roles and templates that lose text, columns."""

import json
from pathlib import Path

import pytest

from rlhf.config import DataConfig, RewardConfig
from rlhf.config.names.hints import hint
from rlhf.data import PromptSet, build_train_set, check_sources
from tests.support.letters import letter_tokenizer, text_of
from tests.support.refusals import says, user_error

EXACT = RewardConfig(functions=["exact_match"])
ASKED, ANSWERED = {"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def data_of(folder: Path, *rows, **settings) -> DataConfig:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(train_files=str(path), **settings)


def build(data: DataConfig, template: str = CHATML, reward: RewardConfig = EXACT) -> PromptSet:
    return build_train_set(data, reward, 1, letter_tokenizer(template))


def rejected(data: DataConfig, *texts: str) -> None:
    """Check that both the check before the ranks start and the ranks' build reject `data` with `texts`."""
    says(user_error(check_sources, data, EXACT, 1), *texts)
    says(user_error(build, data), *texts)


@pytest.mark.parametrize("role", ["assistant", "gpt", "model"])
def test_a_prompt_with_the_answer_as_last_turn(tmp_path, role):
    row = {"messages": [ASKED, ANSWERED | {"role": role}], "answer": "2"}
    data = data_of(tmp_path, row, prompt_key="messages")
    rejected(data, "t.jsonl line 1", "messages", role, "data.last_turn_as_answer=true")


@pytest.mark.parametrize("last", [False, True])
def test_a_chat_that_ends_with_two_turns_of_the_model(tmp_path, last):
    """data.last_turn_as_answer=true (set in one case) is no remedy alone: one turn of the assistant would remain."""
    row = {"messages": [ASKED, ANSWERED, ANSWERED | {"content": "two"}], "answer": "2"}
    data = data_of(tmp_path, row, prompt_key="messages", last_turn_as_answer=last)
    rejected(data, "t.jsonl line 1", "messages", "2 turns of role assistant", "Remove these turns", "only one of them")


def test_the_last_turn_becomes_the_answer(tmp_path):
    (tmp_path / "rewards.py").write_text("def f(completions, prompts, answer, **kwargs): ...")
    rewards = RewardConfig(functions=[f"{tmp_path}/rewards.py:f"])
    earlier = [ASKED, ANSWERED, {"role": "user", "content": "and 1"}]
    row = {"messages": [*earlier, {"role": "assistant", "content": "3"}], "reward_model": {"ground_truth": "9"}}
    data = data_of(tmp_path, row, prompt_key="messages", last_turn_as_answer=True)
    check_sources(data, rewards, 1)
    (prompt,) = build(data, reward=rewards)
    assert (prompt.messages, prompt.ground_truth) == (earlier, "3")
    assert text_of(prompt) == "<user>1 + 1</s><assistant>2</s><user>and 1</s><assistant>"
    assert prompt.columns["prompt"] == earlier, "the reward function's prompt has no answer either"
    assert prompt.columns["answer"] == "3"


@pytest.mark.parametrize("chat", ["1 + 1", [ASKED], [ANSWERED], [ANSWERED, ASKED], None, ["x", "y"]])
def test_a_row_without_a_question_and_a_final_answer_is_rejected(tmp_path, chat):
    data = data_of(tmp_path, {"messages": chat}, prompt_key="messages", last_turn_as_answer=True)
    rejected(data, "t.jsonl line 1", "messages", "data.last_turn_as_answer=true", "data.last_turn_as_answer=false")


@pytest.mark.parametrize("last", [False, True])
def test_sharegpt_conversations(tmp_path, last):
    turns = [{"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"}]
    data = data_of(tmp_path, {"conversations": turns}, prompt_key="conversations", last_turn_as_answer=last)
    rejected(data, "t.jsonl line 1", "conversations", "ShareGPT", "role", "content", "human", "assistant", "gpt")


SILENT = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}>"


def test_a_role_that_the_template_leaves_out(tmp_path):
    rows = [{"prompt": [{"role": role, "content": "1 + 1"}], "answer": "2"} for role in ("user", "human")]
    data = data_of(tmp_path, *rows)
    build(data)  # this template prints every role
    says(user_error(build, data, SILENT), "t.jsonl line 2", "human", "user", "assistant", "model.chat_template")
    data = data_of(tmp_path, {"prompt": "1 + 1", "answer": "2"}, system_prompt="Be brief.")
    says(user_error(build, data, SILENT), "t.jsonl line 1", "system", "model.chat_template")


def test_a_template_that_rejects_messages_in_another_order(tmp_path):
    """Like Gemma's, the template requires alternating roles, so the checks change messages instead of omitting them."""
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('!') }}"
        "{% endif %}{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt else '' }}"
    )
    data = data_of(tmp_path, {"prompt": [ASKED, ANSWERED, ASKED], "answer": "2"})
    assert text_of(build(data, template)[0]) == "1 + 121 + 1>"


def test_a_template_without_a_generation_prompt(tmp_path):
    data = data_of(tmp_path, {"prompt": "1 + 1", "answer": "2"})
    without = CHATML.partition("{% if")[0]
    says(user_error(build, data, without), "model.path=some/model", "'<assistant>'", "model.chat_template")
    for responds_at_once in (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
        "{% endif %}{% endfor %}",
        without + "<assistant>",
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('!') }}{% endif %}{{ m.content }}"
        "{% endfor %}",
    ):
        build(data, responds_at_once)


@pytest.mark.parametrize(
    ("columns", "overrides"),
    [
        ("question solution", "data.prompt_key=question data.answer_key=solution?"),
        ("problem answer", "data.prompt_key=problem?"),
        ("id problem final_answer", "data.prompt_key=problem data.answer_key=final_answer?"),
        ("messages id", "data.prompt_key=messages?"),
        ("question reward_model", "data.prompt_key=question?"),
    ],
)
def test_a_missing_prompt_column_names_the_overrides(tmp_path, columns, overrides):
    data = data_of(tmp_path, dict.fromkeys(columns.split(), "x"))
    rejected(data, "t.jsonl line 1", "data.prompt_key", columns.replace(" ", ", "), overrides)


def test_a_missing_answer_column_names_the_override(tmp_path):
    rejected(data_of(tmp_path, {"prompt": "1 + 1", "solution": "2"}), "data.answer_key", "data.answer_key=solution?")
    # The message does not offer the prompt's own column as the answer.
    message = user_error(check_sources, data_of(tmp_path, {"target": "1 + 1"}, prompt_key="target"), EXACT, 1)
    assert "data.answer_key=target" not in message


@pytest.mark.parametrize(
    ("key", "texts"),
    [
        ("data.image_key", ("text",)),
        ("data.video_key", ("text",)),
        ("data.return_multi_modal_inputs", ("text",)),
        ("data.sampler.class_path", ("data.shuffle=false",)),
        ("data.sampler.class_name", ("data.shuffle=false",)),
    ],
)
def test_verls_settings_of_images_and_samplers(key, texts):
    says(hint(key), *texts)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ["tool_calls", "function_call"])
def test_a_prompt_with_tool_calls_is_rejected(tmp_path, last, name):
    """A template might print the calls, but a prompt has only texts."""
    calling = {"role": "assistant", "content": "", name: [{"function": {"name": "add", "arguments": "{}"}}]}
    rows = [[ASKED, calling, {"role": "tool", "content": "2"}, *[ANSWERED] * last]]
    data = data_of(tmp_path, *({"prompt": chat, "answer": "2"} for chat in rows), last_turn_as_answer=last)
    rejected(data, "t.jsonl line 1", "prompt", name, "content")
    parquet = {"prompt": [ASKED | {name: None}, ANSWERED | {name: []}, ASKED], "answer": "2"}
    build(data_of(tmp_path, parquet))  # in parquet every message has the fields of all messages


@pytest.mark.parametrize("place", ["prompt", "content", "name"])
def test_half_of_a_surrogate_pair_in_a_prompt(tmp_path, place):
    half = "x \ud800 y"
    prompt = half if place == "prompt" else [ASKED | {place: half}]
    data = data_of(tmp_path, {"prompt": "1 + 1 \U0001f600", "answer": "2"}, {"prompt": prompt, "answer": "2"})
    rejected(data, "t.jsonl line 2", "'prompt' (data.prompt_key)", "half of a surrogate pair", "x \\ud800 y", "Correct")
