"""Turns joined as tokens equal the whole conversation's tokens for all families, and tool calls are parsed back."""

import json
from datetime import date
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.turns.chat_turns import ChatTurns, env_template
from rlhf.data.turns.text_tools import TextTools
from rlhf.data.turns.tool_calls import ToolSchemas
from tests.support.families import TOOLS, chat_template, family_tokenizer, tool
from tests.support.refusals import says, user_error
from tests.support.tiny_models import tiny_tokenizer

DAY = date(2026, 11, 26)
TEXT = st.text(st.sampled_from("ab 1.\n{}\"',é✓"), min_size=1, max_size=12).map(lambda text: f"A{text}.")
"""Texts that begin and end without blanks."""
ARGUMENTS = {
    "add": st.fixed_dictionaries({"a": st.integers(-99, 99), "b": st.integers(-99, 99)}),
    "search": st.fixed_dictionaries({"query": TEXT}),
    "look": st.just({}),
}
CALLS = st.lists(
    st.sampled_from(sorted(ARGUMENTS)).flatmap(lambda name: st.tuples(st.just(name), ARGUMENTS[name])),
    min_size=1,
    max_size=3,
)
TURNS = st.lists(st.tuples(TEXT, st.none() | TEXT, st.none() | CALLS, st.booleans(), TEXT), min_size=1, max_size=4)
"""Per turn: answer, thoughts, calls, whether a user message follows the calls' results, and this message's text."""


def jsons(calls, key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {json.dumps(each, ensure_ascii=False)}}}' for name, each in calls]


def thinking(thoughts: str | None) -> str:
    return f"<think>\n{thoughts}\n</think>\n\n" if thoughts else ""


def qwen(text, thoughts, calls) -> str:
    parts = ([text] if text else []) + [f"<tool_call>\n{call}\n</tool_call>" for call in jsons(calls)]
    return thinking(thoughts) + "\n".join(parts) + "<|im_end|>"


def chatml(text, thoughts, calls) -> str:
    def written(name, arguments):
        if name == "search":
            return f"<search({arguments['query']})>"
        return f"<{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})>"

    return thinking(thoughts) + "\n".join([text, *(written(*call) for call in calls)]) + "<|im_end|>"


def llama3(text, thoughts, calls) -> str:
    return ("; ".join(jsons(calls, "parameters")) if calls else thinking(thoughts) + text) + "<|eot_id|>"


def gemma3(text, thoughts, calls) -> str:
    blocks = [f"```tool_code\n{call}\n```" for call in jsons(calls, "parameters")]
    return thinking(thoughts) + "\n".join([text, *blocks]) + "<end_of_turn>"


def mistral(text, thoughts, calls) -> str:
    numbered = [call[:-1] + f', "id": "call0000{i}"}}' for i, call in enumerate(jsons(calls))]
    return (f"[TOOL_CALLS] [{', '.join(numbered)}]" if calls else f" {text}") + "</s>"


def mistral_small(text, thoughts, calls) -> str:
    written = (f"[TOOL_CALLS]{name}[ARGS]{json.dumps(each, ensure_ascii=False)}" for name, each in calls)
    return text + "".join(written) + "</s>"


def harmony(text, thoughts, calls) -> str:
    parts = [f"<|channel|>analysis<|message|>{thoughts}<|end|>"] if thoughts else []
    parts += [
        f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(each, ensure_ascii=False)}<|call|>"
        for name, each in calls
    ]
    return "<|start|>assistant".join(parts if calls else [*parts, f"<|channel|>final<|message|>{text}<|return|>"])


FAMILIES = {
    "chatml": ("chatml", chatml, {}),
    "qwen2_5": ("qwen", qwen, {}),
    "qwen3": ("qwen", qwen, {}),
    "qwen3 without thinking": ("qwen", qwen, {"enable_thinking": False}),
    "llama3": ("llama3", llama3, {}),
    "gemma3": ("gemma", gemma3, {}),
    "mistral": ("mistral", mistral, {}),
    "mistral_small": ("mistral", mistral_small, {}),
    "harmony": ("harmony", harmony, {}),
}
"""The tokenizer, a function that writes the policy's turn, and variables of the template."""
NO_TEXT_BESIDE_CALLS = {"llama3", "mistral", "harmony"}
NO_THOUGHTS = {"mistral", "mistral_small", "qwen3 without thinking"}
REWRITES = {"qwen3", "qwen3 without thinking", "llama3", "mistral", "mistral_small", "harmony"}


@cache
def opened(family: str) -> tuple[ChatTurns, Any]:
    tokenizer, _, variables = FAMILIES[family]
    made = family_tokenizer(tokenizer, chat_template(family.split()[0]))
    return ChatTurns(made, TOOLS, variables=variables, day=DAY), made


def rendered(family: str, tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of the whole conversation by the template that keeps earlier turns."""
    native = family not in ("chatml", "gemma3")
    if not native:
        texts = TextTools(ToolSchemas(TOOLS), family == "gemma3", announced=True, system=True)
        messages = texts.prompt(messages)
    fitted = []
    for message in messages:
        message = dict(message)
        thoughts = message.pop("reasoning_content", None)
        if thoughts and family in ("qwen3", "harmony"):
            message |= {"reasoning_content": thoughts, "thinking": thoughts}
        elif thoughts:
            message["content"] = thinking(thoughts) + message["content"]
        fitted.append(message)
    _, _, variables = FAMILIES[family]
    template = chat_template(family.split()[0])
    for printed in ("%d %b %Y", "%Y-%m-%d"):
        template = template.replace(f"strftime_now('{printed}')", repr(DAY.strftime(printed)))
    options = {"keep": True, "add_generation_prompt": True, "tokenize": False, "chat_template": template}
    text = tokenizer.apply_chat_template(fitted, tools=TOOLS if native else None, **options, **variables)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=15)
@given(st.none() | TEXT, TEXT, TURNS)
def test_joined_turns_are_the_whole_conversation(family, system, question, drawn):
    turns, tokenizer = opened(family)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    tokens = turns.prompt(messages)
    for text, thoughts, calls, interrupted, more in drawn:
        text = "" if calls and family in NO_TEXT_BESIDE_CALLS else text
        thoughts = None if family in NO_THOUGHTS or (calls and family == "llama3") else thoughts
        sampled = tokenizer(FAMILIES[family][1](text, thoughts, calls or []), add_special_tokens=False)["input_ids"]
        turn = turns.parse(sampled)
        assert (turn.text, turn.thoughts, turn.ended) == (text, thoughts or "", True)
        assert [(call.name, call.arguments) for call in turn.calls] == (calls or [])
        assert not turn.invalid
        new = [call.result("42") for call in turn.calls]
        if not new or interrupted:
            new.append({"role": "user", "content": more})
        messages += [turn.message(), *new]
        tokens += sampled + turns.observation(sampled, new)
    assert tokenizer.decode(tokens) == tokenizer.decode(rendered(family, tokenizer, messages))
    assert tokens == rendered(family, tokenizer, messages)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3"])
@settings(deadline=None, max_examples=30)
@given(TEXT, TURNS)
def test_joined_turns_are_those_of_the_renderers_package(family, question, drawn):
    """The package has no renderer for ChatML, Gemma 3 or Mistral. Its renderer for GPT-OSS downloads a vocabulary."""
    renderers = pytest.importorskip("renderers")
    turns, tokenizer = opened(family)
    if family == "llama3":
        config = renderers.Llama3RendererConfig()
    else:  # both Qwen families have the same separators
        config = renderers.Qwen3RendererConfig(thinking_retention="all")
    theirs = renderers.create_renderer(tokenizer, config)
    tokens = turns.prompt([{"role": "user", "content": question}])
    for text, thoughts, calls, interrupted, more in drawn:
        text = "" if calls and family == "llama3" else text
        thoughts = None if calls and family == "llama3" else thoughts
        sampled = tokenizer(FAMILIES[family][1](text, thoughts, calls or []), add_special_tokens=False)["input_ids"]
        new = [call.result("42") for call in turns.parse(sampled).calls]
        if not new or interrupted:
            new.append({"role": "user", "content": more})
        bridged = theirs.bridge_to_next_turn(tokens, sampled, new, tools=TOOLS)
        assert bridged is not None
        tokens += sampled + turns.observation(sampled, new)
        assert tokenizer.decode(tokens) == tokenizer.decode(bridged.token_ids)
        assert tokens == list(bridged.token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_that_rewrite_are_replaced_after_the_prompt(family, caplog):
    caplog.set_level("INFO")
    turns, _ = opened.__wrapped__(family)
    assert (turns.template_name != "the tokenizer's") == (family in REWRITES)
    assert [turns.template_name in record.getMessage() for record in caplog.records] == [True] * (family in REWRITES)


def of_text(*tools: dict[str, Any], template: str | None = None, stock: str | None = None, **options) -> ChatTurns:
    """Return the turns of a ChatML tokenizer with a template of its own, or with `template` as env.template."""
    return ChatTurns(family_tokenizer("qwen", stock or chat_template("qwen2_5")), tools, template, day=DAY, **options)


def text_after(turns: ChatTurns, sampled: str, *messages: dict[str, Any]) -> str:
    tokenizer = family_tokenizer("qwen")
    return tokenizer.decode(turns.observation(tokenizer(sampled)["input_ids"], messages))


GO = {"role": "user", "content": "Go on."}


def test_a_turn_that_was_cut_is_closed_before_the_next_message():
    turns = of_text()
    next_turn = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert text_after(turns, "cut", GO) == "<|im_end|>" + next_turn
    assert text_after(turns, "whole<|im_end|>", GO) == next_turn
    cut = turns.parse(family_tokenizer("qwen")("cut")["input_ids"])
    assert (cut.text, cut.ended, cut.actions) == ("cut", False, ())


def test_a_cut_analysis_of_harmony_does_not_end_with_the_return_token():
    turns, tokenizer = opened("harmony")
    cut = tokenizer("<|channel|>analysis<|message|>Hm")["input_ids"]
    assert turns.parse(cut).thoughts == "Hm"
    assert tokenizer.decode(turns.observation(cut, [GO])).startswith("<|end|><|start|>user<|message|>Go on.")
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in turns.stop_token_ids, "a turn goes on after its analysis"


def test_without_tools_a_turn_is_text():
    turns = of_text()
    text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    turn = turns.parse(family_tokenizer("qwen")(text + "<|im_end|>")["input_ids"])
    assert (turn.text, turn.actions) == (text, ())


def test_the_tiny_policy_calls_tools_in_the_plain_format():
    tokenizer = tiny_tokenizer()
    turns = ChatTurns(tokenizer, [tool("calc", expression="string")], day=DAY)
    prompt = tokenizer.decode(turns.prompt([{"role": "user", "content": "12 + 30 ="}]))
    described = "Call a tool with <name(arguments)>:\n<calc(expression: string)> Calls calc."
    assert prompt == f"<|system|>{described}<|end|><|user|>12 + 30 =<|end|><|assistant|>"
    silent = ChatTurns(tokenizer, [tool("calc", expression="string")], day=DAY, announce=False)
    assert tokenizer.decode(silent.prompt([{"role": "user", "content": "1"}])) == "<|user|>1<|end|><|assistant|>"
    sampled = tokenizer("<calc(12+30)><|end|>")["input_ids"]
    (call,) = silent.parse(sampled).calls
    assert (call.name, call.arguments) == ("calc", {"expression": "12+30"})
    assert tokenizer.decode(silent.observation(sampled, [call.result("42")])) == "<|user|>42<|end|><|assistant|>"


UNFIT = {
    "rewrites": (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content[-9:] if loop.revindex > 2 else m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}",
        "changes earlier turns",
    ),
    "drops thoughts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}",
        "leaves out a part",
    ),
    "another beginning": (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>model:{% endif %}",
        "differently",
    ),
    "no end": ("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}", "no special token"),
    "one answer": (
        "{% if messages | length > 1 %}{{ raise_exception('one {role}') }}{% endif %}{{ messages[0].content }}",
        "one {role}",
    ),
    "syntax": ("{% for m in messages %}", "rejects"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_unknown_template_that_cannot_be_extended_is_an_error(case):
    template, fact = UNFIT[case]
    says(user_error(partial(of_text, stock=template)), "model.path=some/qwen", fact, "env.template")
    says(user_error(partial(of_text, template=template)), "env.template", fact)


def test_calls_in_an_unknown_format():
    stock = chat_template("qwen2_5").replace("<tool_call>", "<call>").replace("</tool_call>", "</call>")
    says(user_error(partial(of_text, *TOOLS, stock=stock)), "model.path=some/qwen", "hermes", "env.template")


def test_a_family_with_other_separators_is_not_recognised():
    """The family's training template is not used if it prints other text after a turn than the tokenizer's template."""
    stock = chat_template("qwen3").replace("<tool_response>", "<result>")
    says(
        user_error(partial(of_text, *TOOLS, stock=stock)),
        "model.path=some/qwen",
        "changes earlier turns",
        "env.template",
    )


def test_env_template_replaces_the_tokenizer_s():
    turns = of_text(*TOOLS, stock=chat_template("qwen3"), template=chat_template("qwen2_5"))
    assert turns.template_name == "env.template"
    assert "You help." in family_tokenizer("qwen").decode(turns.prompt([GO]))


def test_the_file_of_env_template(tmp_path):
    path = tmp_path / "own.jinja"
    says(user_error(env_template, str(path)), f"env.template={path}", "not a file")
    path.write_text("{% for m in messages %}")
    says(user_error(env_template, str(path)), f"env.template={path}", "line 1")
    path.write_text(chat_template("chatml"))
    assert env_template(str(path)) == chat_template("chatml")


def test_a_prompt_or_message_that_the_template_rejects():
    turns, _ = opened("gemma3")
    says(
        user_error(turns.prompt, [GO, turns.parse([]).message(), turns.parse([]).message()]), "some/gemma", "alternate"
    )


def test_a_template_without_system_messages_describes_tools_in_the_question():
    stock = chat_template("chatml").replace(
        "{%- for", "{%- if messages[0].role == 'system' -%}{{ bad.x.y }}{%- endif -%}{%- for", 1
    )
    turns = of_text(TOOLS[2], stock=stock)
    prompt = family_tokenizer("qwen").decode(turns.prompt([GO]))
    assert prompt.startswith("<|im_start|>user\nCall a tool with <name(arguments)>:\n<look()> Calls look.\n\nGo on.")


def test_templates_print_the_day_of_the_run():
    turns, tokenizer = opened("llama3")
    assert "Today Date: 26 Nov 2026" in tokenizer.decode(turns.prompt([GO]))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_environments_text_cannot_end_its_message(family):
    """Special tokens in a result or user message become plain text, so only the template's special tokens remain."""
    turns, tokenizer = opened(family)
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    sampled = tokenizer(FAMILIES[family][1]("", None, [("look", {})]), add_special_tokens=False)["input_ids"]
    (look,) = turns.parse(sampled).calls
    for message in (look.result, lambda text: {"role": "user", "content": text}):
        texts = "".join(special.values()) + "x", "x"
        found, expected = ([t for t in turns.observation(sampled, [message(text)]) if t in special] for text in texts)
        assert found == expected
    harmless = turns.harmless("".join(special.values()))
    assert not special.keys() & set(tokenizer(harmless, add_special_tokens=False)["input_ids"])


HALF = json.dumps("\ud83d")


@pytest.mark.parametrize(
    "arguments", [{"a": HALF, "b": "1"}, {"a": "1", HALF.strip('"'): "1"}, {"a": "[" * 900 + "]" * 900, "b": "1"}]
)
def test_values_that_are_no_text_are_invalid_and_can_be_answered(arguments):
    turns, tokenizer = opened("qwen3")
    body = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    for name in ("add", HALF.strip('"')):
        sampled = tokenizer(f'<tool_call>{{"name": "{name}", "arguments": {{{body}}}}}</tool_call><|im_end|>')[
            "input_ids"
        ]
        (invalid,) = turns.parse(sampled).invalid
        assert turns.observation(sampled, [invalid.result()])


def test_python_of_any_depth_is_an_invalid_call():
    turns, tokenizer = opened("gemma3")
    sampled = tokenizer("```tool_code\nadd(" + "+".join(["1"] * 900) + ")\n```<end_of_turn>")["input_ids"]
    assert [call.reason.partition(":")[0] for call in turns.parse(sampled).invalid] == ["the code is not a call"]
