"""Checks a chat template before any tokenizer loads: its syntax, and the rendering of one prompt."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.models.config_check import read_object
from rlhf.models.template_rendering import environment, rendering_problem

_DEFAULT = "default"  # name of the template for prompts without tools
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def check_template(name: str, template: str | None) -> None:
    """Check the chat template in the file `template`, or if that is None, in the model folder `name`.

    This function does not check Hub names. A tokenizer with its own class needs no template.

    Raises:
        UserError: the template is missing, not UTF-8, not valid Jinja, or never uses `messages`.
    """
    folder = Path(name).expanduser()
    if template is not None:
        path = Path(template).expanduser()
        check_syntax(f"model.chat_template={template}", read_template(path))
    elif folder.is_dir():
        found = list(_templates(folder))
        for where, _, text in found:
            check_syntax(f"model.path={name}: {where}", text)
        own_class = (folder / "tekken.json").is_file() or any(folder.glob("tokenization_*.py"))
        if not found and not own_class:
            raise missing_template(name)


def missing_template(name: str) -> UserError:
    return UserError(
        f"model.path={name}: its tokenizer has no chat template, so prompts cannot be rendered. Use an "
        "instruction-tuned model, or set model.chat_template to a Jinja file."
    )


def check_rendering(
    name: str, template: str | None, where: str, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]
) -> None:
    """Check that the chat template, found as in `check_template`, renders a prompt.

    Args:
        where: the prompt's file and line.
        variables: `data.apply_chat_template_kwargs`.

    Raises:
        UserError: the template fails on the prompt, or does not use one of the variables.
    """
    folder = Path(name).expanduser()
    if template is not None:
        prefix, text = f"model.chat_template={template}", read_template(Path(template).expanduser())
    else:
        found = next((each for each in _templates(folder) if each[1] == _DEFAULT), None)
        if found is None:
            return
        prefix, text = f"model.path={name}: {found[0]}", found[2]
    check_variables(prefix, text, variables)
    if problem := rendering_problem(text, messages, _special_tokens(folder) | dict(variables)):
        raise UserError(
            f"{where}: the chat template ({prefix}) {problem}, or set model.chat_template to another template."
        )


def check_variables(where: str, text: str, variables: Mapping[str, Any]) -> None:
    """Raise UserError unless the chat template `text` uses all `variables`; `where` names the template."""
    for name, value in variables.items():
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise UserError(
                f"data.apply_chat_template_kwargs.{name}={value}: has no effect, since the chat template ({where}) has "
                f"no variable {name}. Remove the setting, or correct the name."
            )


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens in the tokenizer's files; empty strings for tokens that only its class may define."""
    tokens = dict.fromkeys(_SPECIAL_TOKENS, "")
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        named = read_object(folder / file) or {}
        found = {key: named.get(key) for key in _SPECIAL_TOKENS}
        found = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
        tokens |= {key: value for key, value in found.items() if isinstance(value, str)}
    return tokens


def read_template(path: Path) -> str:
    """Return the text of a template's file. Raise UserError if the file is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a valid chat template: not UTF-8 ({error.reason}). Convert the file.") from error


def check_syntax(where: str, text: str) -> None:
    """Raise UserError, with the line, for invalid Jinja, and for a template that never uses `messages`."""
    import jinja2
    from jinja2 import nodes

    try:
        tree = environment().parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"{where}, line {error.lineno}: not a valid chat template: {str(error.message).rstrip('.')}. Correct it."
        ) from error
    except RecursionError as error:
        raise UserError(f"{where}: not a valid chat template: nested too deeply. Simplify it.") from error
    if all(name.name != "messages" for name in tree.find_all(nodes.Name)):
        raise UserError(f"{where}: not a chat template: it never uses `messages`, so it prints no prompt. Correct it.")


def _templates(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield file, name and text of all chat templates in `folder`; of two with the same name, the first applies."""
    if (path := folder / "chat_template.jinja").is_file():
        yield path.name, _DEFAULT, read_template(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        yield path.name, path.stem, read_template(path)
    for file, name in (("tokenizer_config.json", _DEFAULT), ("chat_template.json", "processor")):
        template = (read_object(folder / file) or {}).get("chat_template")
        if isinstance(template, str):
            yield file, name, template
        for entry in template if isinstance(template, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                yield file, str(entry.get("name")), entry["template"]
