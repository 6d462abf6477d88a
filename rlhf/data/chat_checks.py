"""Checks that the chat template prints the messages of every role, and ends prompts with a generation prompt."""

from collections.abc import Callable, Sequence

from rlhf.data.items import Row
from rlhf.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
_ANSWER = "ANSWER"

Render = Callable[[Sequence[dict[str, str]], bool], str | None]
"""Renders messages, with or without a generation prompt; returns None if the template rejects them."""


class ChatChecks:
    """Checks the first message of each role, and the generation prompt once.

    Args:
        template: where the template comes from, for error messages.
    """

    def __init__(self, template: str, render: Render):
        self._template, self._render = template, render
        self._roles = set[str]()

    def check(self, row: Row) -> None:
        """Check a row whose messages the template has rendered.

        Raises:
            UserError: the template leaves out a message, or has no generation prompt.
        """
        if not self._roles:
            self._check_generation_prompt(row)
        for i, message in enumerate(row.messages):
            if message["role"] not in self._roles:
                self._roles.add(message["role"])
                self._check_printed(row, i)

    def _check_printed(self, row: Row, i: int) -> None:
        role = row.messages[i]["role"]
        changed = [*row.messages]
        changed[i] = {**changed[i], "content": changed[i]["content"] + _ANSWER}
        if self._render(changed, True) == self._render(row.messages, True):
            remedy = (
                "Move its text to a user message" if role in ROLES else "Rename roles to system, user and assistant"
            )
            raise UserError(
                f"{row.where}: the chat template ({self._template}) leaves out the message of role {role!r}, so the "
                f"model would not see it. {remedy}, or set model.chat_template to a template that prints {role!r}."
            )

    def _check_generation_prompt(self, row: Row) -> None:
        prompt = self._render(row.messages, False)
        if prompt is None or prompt != self._render(row.messages, True):
            return
        # Mistral's templates need no generation prompt: the response directly follows the prompt.
        answered = self._render([*row.messages, {"role": "assistant", "content": _ANSWER}], False)
        if answered is None or not answered.startswith(prompt) or _ANSWER not in answered.removeprefix(prompt):
            return
        if start := answered.removeprefix(prompt).partition(_ANSWER)[0].strip():
            raise UserError(
                f"{self._template}: the chat template ignores add_generation_prompt: it prints {start!r} before a "
                "response, but not at the end of a prompt. Set model.chat_template to a template that prints a "
                "generation prompt."
            )
