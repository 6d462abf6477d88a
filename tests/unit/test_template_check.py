"""Chat templates that are invalid, incomplete or fail on a prompt are rejected before a tokenizer is loaded."""

import json
import shutil
from pathlib import Path

import pytest

import rlhf
from rlhf.models.template_check import check_rendering, check_syntax, check_template
from tests.support.refusals import says, user_error

TINY = Path(rlhf.__file__).parent / "models" / "tiny_policy"
ASKING = [{"role": "user", "content": "1 + 1"}]


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


@pytest.mark.parametrize("text", ["", "Answer with a number."])
def test_a_template_without_the_prompt_is_refused(folder, text):
    path = folder / "other.jinja"
    path.write_text(text)
    says(user_error(check_template, str(folder), str(path)), f"model.chat_template={path}", "messages")


def test_a_missing_template(folder, tmp_path):
    (folder / "chat_template.jinja").unlink()
    says(user_error(check_template, str(folder), None), str(folder), "no chat template", "model.chat_template")
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages }}")
    check_template(str(folder), str(own))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ messages }}"}))
    check_template(str(folder), None)


def test_a_syntax_error_names_the_template_and_its_line(folder, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}\n{{ m['content'] }\n{% endfor %}")
    says(user_error(check_template, str(folder), str(own)), f"model.chat_template={own}", "line 2", "unexpected '}'")
    (folder / "chat_template.jinja").write_text("{% if x %}")
    says(user_error(check_template, str(folder), None), f"model.path={folder}", "chat_template.jinja", "line 1")


def test_the_tags_of_transformers_are_known():
    check_syntax("x", "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% continue %}{% endfor %}")


def rendered(folder: Path, text: str, messages=ASKING, **variables) -> None:
    """Check `text` as the folder's own template."""
    (folder / "chat_template.jinja").write_text(text)
    check_rendering(str(folder), None, "a.jsonl line 1", messages, variables)


FAILING = {
    "refused": (
        "{% if messages[0].role == 'user' %}{{ raise_exception('No users!') }}{% endif %}",
        "No users!",
    ),
    "undefined": ("{{ messages[0].content + greeting }}", "UndefinedError: 'greeting' is undefined"),
    "no number": ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "TypeError: "),
    "unsafe": ("{{ messages.append(1) }}", "SecurityError: "),
    "a loop over nothing": ("{% for m in messages %}{% for x in 5 %}{% endfor %}{% endfor %}", "TypeError: 'int'"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_template_that_fails_on_a_prompt_is_rejected_early(folder, kind):
    text, expected = FAILING[kind]
    message = user_error(rendered, folder, text)
    says(message, "a.jsonl line 1", f"model.path={folder}", "chat_template.jinja", expected, "model.chat_template")
    own = folder / "own.jinja"
    own.write_text(text)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert f"(model.chat_template={own})" in user_error(check_rendering, str(folder), str(own), "", ASKING, {})


WORKING = [
    "{{ bos_token + messages[0].content + eos_token + pad_token }}",
    "{{ strftime_now('%Y') + messages[0].content }}",
    "{% for m in messages %}{% generation %}{{ m | tojson(indent=2) }}{% endgeneration %}{% break %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ dict(a=1).a }}{{ dict.fromkeys([1]) }}{{ messages | length }}",
    "{% if tools %}{{ tools + 1 }}{% endif %}{% if enable_thinking is defined %}{{ 1 + enable_thinking }}{% endif %}"
    "{{ messages[0].content }}",
]


@pytest.mark.parametrize("text", WORKING)
def test_functions_that_transformers_gives_to_templates_are_available(folder, text):
    rendered(folder, text)


def test_variables_are_given_and_must_have_an_effect(folder):
    rendered(folder, "{{ messages[0].content + greeting }}", greeting="hello")
    message = user_error(lambda: rendered(folder, "{{ messages }}", greeting="hello"))
    says(message, "data.apply_chat_template_kwargs.greeting=hello", "no effect", "chat_template.jinja")


def test_of_several_templates_the_default_one_is_rendered(folder):
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    named = [
        {"name": "rag", "template": "{{ messages + documents }}"},
        {"name": "default", "template": "{{ messages }}"},
    ]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    check_rendering(str(folder), None, "a.jsonl line 1", ASKING, {})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named[:1]}))
    check_rendering(str(folder), None, "a.jsonl line 1", ASKING, {})
    check_rendering("org/name", None, "a.jsonl line 1", ASKING, {})


def test_every_template_of_a_file_is_checked(folder):
    path = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "{% if messages %}"}, {"name": "rag", "template": "{{ messages }}"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    says(user_error(check_template, str(folder), None), "tokenizer_config.json", "line 1")


# Takes some tenths of a second, far more than the test's deadline.
ENDLESS = "{{ messages }}{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_is_refused(folder, monkeypatch):
    monkeypatch.setattr("rlhf.models.template_rendering.DEADLINE_S", 0.01)
    (folder / "chat_template.jinja").write_text(ENDLESS)
    message = user_error(check_rendering, str(folder), None, "a.jsonl line 1", ASKING, {})
    says(message, "a.jsonl line 1", "model.path=", "0.01 s")


@pytest.mark.parametrize("text", ["{{ 'a' * 10**10 }}", "{{ '%10000000000d' % 1 }}"], ids=["constant", "width"])
def test_a_template_without_bounds_is_refused(folder, text):
    """Such a template once took all memory of the machine."""
    (folder / "chat_template.jinja").write_text(f"{{{{ messages }}}}{text}")
    message = user_error(check_rendering, str(folder), None, "a.jsonl line 1", ASKING, {})
    says(message, "a.jsonl line 1", "model.path=", "2 GiB of memory", "model.chat_template")


@pytest.mark.parametrize("part", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 3000])
def test_a_template_that_is_nested_without_end_is_refused(folder, part):
    (folder / "chat_template.jinja").write_text("{{ messages }}" + part)
    says(user_error(check_template, str(folder), None), "chat_template.jinja", "nested too deeply")


def test_a_template_in_another_encoding_is_refused(folder):
    for path, given in (("own.jinja", str(folder / "own.jinja")), ("chat_template.jinja", None)):
        (folder / path).write_bytes("{{ messages }} é".encode("latin1"))
        says(user_error(check_template, str(folder), given), str(folder / path), "UTF-8")


def test_a_too_deeply_nested_tokenizer_config_is_not_checked_here(folder):
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    check_template(str(folder), None)
    check_rendering(str(folder), None, "a.jsonl line 1", ASKING, {})
