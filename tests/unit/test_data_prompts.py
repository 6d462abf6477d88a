"""Over-long prompts, chat templates, fingerprints, and the position at which a resumed stream continues."""

import logging
import random
from datetime import date, datetime

import numpy as np
import pytest

from rlhf.data import PromptSet, PromptStream
from rlhf.data.items import Row
from rlhf.data.tokens import LengthLimit
from rlhf.errors import UserError
from tests.support.letters import TEMPLATE, letter_tokenizer, text_of
from tests.support.refusals import says


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer()


def rows(*texts: str) -> list[Row]:
    return [Row(i, f"row {i}", [{"role": "user", "content": t}], "s", "g", {}) for i, t in enumerate(texts)]


def prompt_set(tokenizer, *texts: str, limit: int = 100, overlong: str = "filter") -> PromptSet:
    return PromptSet.in_memory(rows(*texts), tokenizer, LengthLimit(limit, overlong, "data.train_files"))


def test_token_ids_are_the_template_with_generation_prompt(tokenizer):
    prompts = prompt_set(tokenizer, *(f"text {i}" for i in range(1500)))
    assert [text_of(p) for p in prompts] == [f"text {i}>" for i in range(1500)]
    assert (prompts.dropped, prompts.truncated) == (0, 0)
    with pytest.raises(IndexError):
        prompts[1500]


def test_filter_drops_and_counts(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        prompts = prompt_set(tokenizer, "abcdef", "ab", "abcdefgh", "cd", limit=4)
    assert [(p.index, text_of(p)) for p in prompts] == [(1, "ab>"), (3, "cd>")]
    assert (prompts.dropped, prompts.truncated) == (2, 0)
    assert prompts.count_text == "2 (of 4; the others are longer than data.max_prompt_length)"
    assert len(caplog.records) == 1
    assert "2 of 4 prompts of data.train_files" in caplog.text


@pytest.mark.parametrize(("side", "expected"), [("left", "cdef>"), ("right", "abcde"), ("middle", "abef>")])
def test_truncation_cuts_token_ids_at_the_side(tokenizer, side, expected, caplog):
    prompts = prompt_set(tokenizer, "abcdef", "ab", limit=5, overlong=side)
    assert [text_of(p) for p in prompts] == [expected, "ab>"]
    assert (prompts.dropped, prompts.truncated) == (0, 1)
    assert f"data.overlong_prompts={side}" in caplog.text


def test_a_limit_of_one_token_truncates_to_one_token(tokenizer):
    got = [text_of(prompt_set(tokenizer, "abc", limit=1, overlong=side)[0]) for side in ("left", "right", "middle")]
    assert got == [">", "a", ">"]


def test_error_policy_says_how_many_and_the_longest(tokenizer):
    with pytest.raises(
        UserError, match=r"2 of 3 prompts .*data\.max_prompt_length=4 .*longest has 9.*overlong_prompts=error"
    ):
        prompt_set(tokenizer, "abcdef", "ab", "abcdefgh", limit=4, overlong="error")
    assert len(prompt_set(tokenizer, "abc", limit=4, overlong="error")) == 1


def test_dropping_all_over_long_prompts_is_an_error(tokenizer):
    with pytest.raises(UserError, match=r"2 of 2 prompts .*max_prompt_length=4.*leaves none.*Raise"):
        prompt_set(tokenizer, "abcdef", "abcdefgh", limit=4)


def test_tokenizer_without_chat_template():
    without = letter_tokenizer()
    without.chat_template = None
    with pytest.raises(UserError, match=r"model\.path=some/model: .*no chat template.*model\.chat_template"):
        prompt_set(without, "a")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% if messages[0]['content'] == 'b' %}{{ raise_exception('not b') }}{% endif %}x",
            r"row 1: the chat template of model\.path rejects the prompt \(roles: user\): not b",
        ),
        ("{{ messages[0].content + ('' if messages[0].content == 'a' else 1) }}", r"row 1: .*rejects .*roles: user"),
        (
            "{% for m in messages if m.content != 'b' %}{{ m.content }}{% endfor %}",
            "row 1: the chat template renders the prompt to zero tokens",
        ),
    ],
)
def test_a_template_that_fails_on_a_chat_names_the_row(template, message):
    with pytest.raises(UserError, match=message):
        prompt_set(letter_tokenizer(template), "a", "b")


def test_the_fingerprint_depends_on_the_rows_only(tokenizer):
    base = prompt_set(tokenizer, "a", "b")
    assert base.fingerprint == prompt_set(tokenizer, "a", "b").fingerprint
    different = [prompt_set(tokenizer, "b", "a"), prompt_set(tokenizer, "a"), prompt_set(tokenizer, "a", "b", "c")]
    changed = [Row(r.index, r.where, r.messages, r.data_source, "other", r.extra_info) for r in rows("a", "b")]
    different.append(PromptSet.in_memory(changed, tokenizer, LengthLimit(100, "filter", "data.train_files")))
    assert len({base.fingerprint, *(p.fingerprint for p in different)}) == 5


def of_day(template: str, day: date) -> PromptSet:
    return PromptSet.in_memory(rows("a"), letter_tokenizer(template), LengthLimit(100, "filter", "some.files", day=day))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('{{ strftime_now("%d %b %Y") }}', "14 Mar 2026"),
        ('  {%- if strftime_now is defined %}{% set d = strftime_now(format="%-m/%-d %H:%M %%d") %}{% endif %}{{ d }}',
         "3/14 00:00 %d"),
        ('{% macro m() %}{{ strftime_now("%A, %B") }}{% endmacro %}{{ m() }}', "Saturday, March"),
        ('\n  {% if true %}\nx{{ strftime_now("%y") }}{% endif %}', "\nx26"),
        ('  {% if true %}\nx{{ strftime_now("%y") }}{% endif %}', "x26"),
        ({"default": '{{ strftime_now("%j") }}', "tool_use": "t"}, "073"),
    ],
)  # fmt: skip
def test_a_template_prints_the_day_that_is_asked_for(template, text):
    printed = "{{ messages[0].content }}"
    whole = template | {"default": template["default"] + printed} if isinstance(template, dict) else template + printed
    assert text_of(of_day(whole, date(2026, 3, 14))[0]) == text.replace("\n", "\0") + "a"


def test_today_is_printed_as_transformers_prints_it():
    template = '{{ strftime_now("%a %A %d %-d %b %B %m %y %Y %j %U %x") }}{{ messages[0].content }}'
    (ids,) = letter_tokenizer(template).apply_chat_template([rows("a")[0].messages], return_dict=False)
    assert of_day(template, datetime.now().date())[0].token_ids == ids


def test_an_error_shows_the_line_number_in_the_chat_template():
    with pytest.raises(UserError, match="line 2"):
        of_day("{{ strftime_now('%Y') }}\n{% if %}", date(2026, 3, 14))


def test_a_prompt_stream_rejects_the_same_rows_with_other_tokens():
    template = TEMPLATE + "{{ strftime_now('%d') }}"
    first, second = (of_day(template, date(2026, 3, day)) for day in (14, 15))
    assert first.fingerprint == second.fingerprint
    state = PromptStream(first, 1, True).state_dict()
    PromptStream(of_day(template, date(2026, 3, 14)), 1, True).load_state_dict(state)
    with pytest.raises(UserError) as caught:
        PromptStream(second, 1, True).load_state_dict(state)
    says(caught.value, "tokens", "chat template", "trainer.allow_config_change=true")
    PromptStream(second, 1, True, allow_change=True).load_state_dict(state)
    PromptStream(second, 1, True).load_state_dict({"consumed": 0, "fingerprint": first.fingerprint})  # release 0.1.0


@pytest.fixture
def ten(tokenizer):
    return prompt_set(tokenizer, *(f"p{i}" for i in range(10)))


def indices(batch) -> list[int]:
    return [drawn.prompt.index for drawn in batch]


def test_every_epoch_is_a_new_permutation_and_uids_never_repeat(ten):
    stream = PromptStream(ten, seed=3, shuffle=True)
    epochs = [stream.next(10) for _ in range(4)]
    assert all(sorted(indices(epoch)) == list(range(10)) for epoch in epochs)
    assert len({tuple(indices(epoch)) for epoch in epochs}) == 4
    assert [drawn.uid for epoch in epochs for drawn in epoch] == list(range(40))
    assert indices(PromptStream(ten, seed=4, shuffle=True).next(10)) != indices(epochs[0])


def test_batches_cross_epochs(ten):
    whole = indices(PromptStream(ten, seed=3, shuffle=True).next(35))
    stream = PromptStream(ten, seed=3, shuffle=True)
    parts, epochs = [], []
    for _ in range(5):
        epochs.append(int(stream.epochs))
        parts += indices(stream.next(7))
    assert parts == whole
    assert epochs == [0, 0, 1, 2, 2]
    assert indices(PromptStream(ten, seed=3, shuffle=True).next(25)) == whole[:25], "one batch may span epochs"


def test_without_shuffle_the_order_is_the_file(ten):
    assert indices(PromptStream(ten, seed=3, shuffle=False).next(13)) == [*range(10), 0, 1, 2]


def test_order_ignores_and_leaves_the_global_generators(ten):
    first = indices(PromptStream(ten, seed=3, shuffle=True).next(20))
    np.random.seed(9)
    random.seed(9)
    expected = np.random.RandomState(9).random()
    assert indices(PromptStream(ten, seed=3, shuffle=True).next(20)) == first
    assert np.random.random() == expected


def test_the_shuffled_order_of_a_seed_does_not_change(ten):
    """A change of this order would change every resumed run."""
    assert indices(PromptStream(ten, seed=1, shuffle=True).next(10)) == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]


@pytest.mark.parametrize("already_drawn", [0, 3, 10, 17, 20])
def test_resume_equals_the_uninterrupted_stream(ten, already_drawn):
    whole = PromptStream(ten, seed=3, shuffle=True).next(40)
    before = PromptStream(ten, seed=3, shuffle=True)
    before.next(already_drawn)
    after = PromptStream(ten, seed=3, shuffle=True)
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    assert after.next(40 - already_drawn) == whole[already_drawn:]


def test_changed_data_is_refused_unless_allowed(ten, tokenizer, caplog):
    stream = PromptStream(ten, seed=3, shuffle=True)
    stream.next(4)
    changed = prompt_set(tokenizer, "x", "y", "z")
    other = PromptStream(changed, seed=3, shuffle=True)
    with pytest.raises(UserError, match=r"data\.train_files.*trainer\.allow_config_change=true"):
        other.load_state_dict(stream.state_dict())
    assert other.state_dict()["consumed"] == 0
    other = PromptStream(changed, seed=3, shuffle=True, allow_change=True)
    other.load_state_dict(stream.state_dict())
    assert "differ from the checkpoint" in caplog.text
    assert [drawn.uid for drawn in other.next(2)] == [4, 5]


def test_a_stream_warns_of_other_held_out_prompts(ten, tokenizer, caplog):
    def stream(*held_out: str, quiet: bool = False) -> PromptStream:
        return PromptStream(ten, 3, True, held_out=prompt_set(tokenizer, *held_out), quiet=quiet)

    state = stream("v", "w").state_dict()
    stream("v", "w").load_state_dict(state)
    stream("v", quiet=True).load_state_dict(state)
    PromptStream(ten, 3, True).load_state_dict(state)  # a resume without an evaluation
    stream("v").load_state_dict(PromptStream(ten, 3, True).state_dict())  # a checkpoint of a run without an evaluation
    assert not caplog.messages
    stream("v").load_state_dict(state)
    (warning,) = caplog.messages
    says(warning, "held-out", "data.val_files", "checkpoint.keep_best")
