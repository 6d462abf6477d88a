"""Renders conversations with a chat template, or their later turns with a training template."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from rlhf.data.template_date import uses_date, with_date

Messages = Sequence[Mapping[str, Any]]
ASKED: Mapping[str, Any] = {"role": "user", "content": "Question."}
MARK = "rlhf-marks-this-answer"
"""Text of a dummy answer. After it, a rendering has the end of the turn and the next messages."""


def answer(text: str = MARK, thoughts: str = "", results: Messages = ()) -> dict[str, Any]:
    """Return an assistant message with the content `text`.

    With `results`, the message has one call per result instead, and `text` is the argument of the last call.
    """
    message: dict[str, Any] = {"role": "assistant", "content": "" if results else text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if results:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": result["tool_call_id"],
                "function": {"name": result["name"], "arguments": {"value": text if i == len(results) - 1 else ""}},
            }
            for i, result in enumerate(results)
        ]
    return message


class TemplateRenderer:
    """Renders whole conversations with a chat template of the tokenizer, or with another template.

    Args:
        template: Jinja text, or texts by name as some tokenizers have.
        variables: `data.apply_chat_template_kwargs`.
        day: the day that the template prints.
    """

    def __init__(self, tokenizer: Any, template: str | Mapping[str, str], variables: Mapping[str, Any], day: date):
        self._tokenizer, self._variables, self._day = tokenizer, variables, day
        named = {"default": template} if isinstance(template, str) else dict(template)
        self._plain = self._dated(named.get("default", next(iter(named.values()))))
        self._with_tools = self._dated(named["tool_use"]) if "tool_use" in named else self._plain
        self.source = "\n".join(named.values())
        self.knows_thoughts = self.prints("x7thoughts", [ASKED, answer("x", "x7thoughts")], False)

    def text(self, messages: Messages, tools: Messages = (), generation_prompt: bool = True) -> str:
        """Return the rendered text. If the template rejects the messages, raise one of `raised_by_templates()`."""
        return self._tokenizer.apply_chat_template(
            [self._fitted(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self._with_tools if tools else self._plain,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **self._variables,
        )

    def prints(self, text: str, messages: Messages, generation_prompt: bool = True, tools: Messages = ()) -> bool:
        """Return whether the template accepts the messages and prints `text`."""
        try:
            return text in self.text(messages, tools, generation_prompt)
        except raised_by_templates():
            return False

    def generation_prompt(self) -> str:
        """Return what the template prints before a turn of the policy."""
        return self.text([ASKED]).removeprefix(self.text([ASKED], generation_prompt=False))

    def _dated(self, template: str) -> str:
        return with_date(template, self._day, self._variables) if uses_date(template) else template

    def _fitted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with its thoughts where the template reads them."""
        fitted = dict(message)
        if thoughts := fitted.pop("reasoning_content", None):
            # `__init__` renders thoughts to test whether the template prints them. Assume during the test that it does.
            if getattr(self, "knows_thoughts", True):
                return fitted | {"reasoning_content": thoughts, "thinking": thoughts}
            fitted["content"] = f"<think>\n{thoughts}\n</think>\n\n{fitted.get('content') or ''}"
        return fitted


class ContinuationRenderer:
    """Renders what follows the first generation prompt of a conversation, with one of our training templates.

    Args:
        template: Jinja text; it reads `messages`, `generation_prompt` and `settings`.
        settings: variables that select the variant of a family.
        generation_prompt: the text before each turn of the policy.
    """

    def __init__(self, tokenizer: Any, template: str, settings: Mapping[str, Any], generation_prompt: str):
        self._tokenizer, self._template = tokenizer, template
        self._variables = {**settings, "generation_prompt": generation_prompt}

    def text(self, messages: Messages, generation_prompt: bool = True) -> str:
        """Return the text of the messages; the first is the policy's."""
        return self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=self._template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **self._variables,
        )


def raised_by_templates() -> tuple[type[Exception], ...]:
    """Return Jinja's errors and Python's errors in template expressions."""
    import jinja2

    return jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError
