"""Converts conversations to tokens and the policy's tokens to calls, without tokenizing sampled text again."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from rlhf.data.turns.call_formats import FORMATS, split_thoughts
from rlhf.data.turns.harmony import harmony
from rlhf.data.turns.prefix_checks import rewriting
from rlhf.data.turns.rendering import (
    ASKED,
    MARK,
    ContinuationRenderer,
    Messages,
    TemplateRenderer,
    answer,
    raised_by_templates,
)
from rlhf.data.turns.text_tools import TextTools
from rlhf.data.turns.tool_calls import ToolSchemas, Turn
from rlhf.data.turns.training_templates import FAMILIES, training_template
from rlhf.errors import UserError
from rlhf.models.special_texts import SpecialTexts
from rlhf.models.template_check import check_syntax, check_variables, missing_template, read_template

log = logging.getLogger(__name__)

HARMONY = "harmony"
_FORMAT_MARKS = {
    HARMONY: "<|channel|>",
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3": "<|start_header_id|>",
}
"""Maps each call format to a text that occurs in its chat templates with tools."""
_MORE_STOPS = {"llama3": ("<|eom_id|>",), HARMONY: ("<|return|>", "<|call|>")}


def env_template(path: str) -> str:
    """Return the chat template in the file `env.template`. Raise UserError for a missing file or invalid syntax."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"env.template={path} is not a file. Correct the path.")
    text = read_template(file)
    check_syntax(f"env.template={path}", text)
    return text


class ChatTurns:
    """Renders prompts and the messages between turns, and parses turns, for one set of tools.

    Args:
        tools: schemas in OpenAI's format; empty for an environment of free text.
        template: text of `env.template`, or None for the tokenizer's template.
        variables: `data.apply_chat_template_kwargs`.
        day: the day that templates print, as in `LengthLimit`; today if None.
        announce: whether to describe the tools in the prompt if the template does not print them.

    Raises:
        UserError: the tokenizer has no chat template, or the template cannot be extended turn by turn, or it writes
            calls in no format that the trainer reads.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Messages,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        day: date | None = None,
        announce: bool = True,
    ):
        if template is None and tokenizer.chat_template is None:
            raise missing_template(tokenizer.name_or_path)
        self._tokenizer, self._variables = tokenizer, dict(variables or {})
        self._where = f"model.path={tokenizer.name_or_path}" if template is None else "env.template"
        text = tokenizer.chat_template if template is None else template
        check_variables(self._where, str(text), self._variables)
        self._template = TemplateRenderer(tokenizer, text, self._variables, day or date.today())
        self._schemas = ToolSchemas(tools)
        native = self._prints_tools(tools)
        self._tools = tuple(tools) if native else ()
        self.format_name = self._find_format(native)
        self._text_tools = None
        if not native:
            system = self._template.prints(MARK, [{"role": "system", "content": MARK}, ASKED])
            self._text_tools = TextTools(self._schemas, self.format_name == "gemma", announce, system)
        self._special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_texts = SpecialTexts(tokenizer)
        try:
            self.generation_prompt = self._template.generation_prompt()
            self._closing = self._end_of([ASKED, answer(), ASKED])
        except raised_by_templates() as error:
            raise UserError(
                f"{self._where}: the chat template rejects a question, an answer and a question: {error}. Set "
                "env.template to a template that accepts them."
            ) from error
        self.template_name = "env.template" if template is not None else "the tokenizer's"
        self._training: ContinuationRenderer | None = None
        self._check_prefixes(given=template is not None)
        self.stop_token_ids = self._find_stops()

    def prompt(self, messages: Messages) -> list[int]:
        """Return the tokens of a prompt with its tools and the generation prompt.

        Raises:
            UserError: the template rejects the messages.
        """
        fitted = self._text_tools.prompt(messages) if self._text_tools else messages
        try:
            return self._tokens(self._template.text(fitted, self._tools))
        except raised_by_templates() as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"The chat template ({self._where}) rejects a prompt of the environment (roles: {roles}): {error}. "
                "Correct the messages of the row or of reset, or set env.template."
            ) from error

    def observation(self, sampled: Sequence[int], messages: Messages) -> list[int]:
        """Return the tokens to append to a turn: its end token if missing, the messages, the next generation prompt.

        Args:
            sampled: the tokens of the turn. If the turn was cut, they do not end with one of `stop_token_ids`.
            messages: results of all calls of the turn, or user messages, or both.

        Raises:
            UserError: the template rejects the messages.
        """
        messages = [
            {key: self.harmless(value) if isinstance(value, str) else value for key, value in message.items()}
            for message in messages
        ]
        fitted = self._text_tools.fitted(messages) if self._text_tools else messages
        dummy = answer(results=[message for message in fitted if message["role"] == "tool"])
        try:
            if self._training:
                text = self._training.text([dummy, *fitted])
            else:
                text = self._template.text([ASKED, dummy, *fitted])
        except raised_by_templates() as error:
            raise UserError(
                f"The chat template ({self._where}) rejects the messages after a turn (roles: "
                f"{', '.join(message['role'] for message in messages)}): {error}. Set env.template to another template."
            ) from error
        closed = bool(sampled) and sampled[-1] in self.stop_token_ids
        return self._after_turn(text) if closed else [self._closing, *self._after_turn(text)]

    def harmless(self, text: str) -> str:
        """Return an environment's text with a space in the names of special tokens.

        Otherwise the text, such as a web page, could end its message and speak as the user, the system or the policy.
        """
        return self._special_texts.harmless(text)

    def parse(self, sampled: Sequence[int]) -> Turn:
        """Return text, thoughts and calls of a turn. A call that no tool can receive becomes an `InvalidCall`."""
        ended = bool(sampled) and sampled[-1] in self.stop_token_ids
        if self.format_name == HARMONY:
            text, thoughts, calls = harmony(self.text(sampled))
        else:
            chat_format = FORMATS[self.format_name]
            whole = self.text(sampled[:-1] if ended else sampled)
            opened = self.generation_prompt.rstrip().endswith(chat_format.thoughts[0])
            thoughts, text = split_thoughts(whole, chat_format.thoughts, opened)
            text, calls = chat_format.read(text, self._schemas) if self._schemas.functions else (text, [])
        text = self._special_texts.without(text)
        # A policy may write an id twice; then only the first call keeps it.
        first = dict[str | None, int]()
        calls = [call if first.setdefault(call.id, i) == i else replace(call, id=None) for i, call in enumerate(calls)]
        actions = tuple(self._schemas.action(call, i) for i, call in enumerate(calls))
        return Turn(text.strip(), thoughts, actions, ended)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _prints_tools(self, tools: Messages) -> bool:
        """Return whether the template prints tools, calls and results."""
        if not tools:
            return False
        name = tools[0]["function"]["name"]
        result = {"role": "tool", "name": name, "tool_call_id": "call00001", "content": '"x7result"'}
        called = [ASKED, answer(results=[result]), result]
        shown = self._template.prints(name, [ASKED], tools=tools)
        return shown and all(self._template.prints(text, called, tools=tools) for text in (MARK, "x7result"))

    def _find_format(self, native: bool) -> str:
        source = self._template.source
        if not native:
            if HARMONY in self._families():
                return HARMONY
            return "gemma" if "<start_of_turn>" in source else "plain"
        for name, mark in _FORMAT_MARKS.items():
            if mark in source:
                return name
        raise UserError(
            f"{self._where}: the chat template has tools, but writes calls in no format that the trainer reads ("
            f"{', '.join(_FORMAT_MARKS)}). Set env.template to a template with one of them, or to one without tools."
        )

    def _families(self) -> list[str]:
        return [each.name for each in FAMILIES if all(mark in self._template.source for mark in each.marks)]

    def _check_prefixes(self, given: bool) -> None:
        """Select a training template if the template rewrites earlier turns. Raise UserError if there is none."""
        if not (problem := rewriting(self._template, self._tools)):
            return
        found = None if given else training_template(self._tokenizer, self._template, self._tools, self._after_turn)
        if found is None:
            remedy = "Correct it" if given else "Set env.template=path.jinja to a template without this problem"
            raise UserError(
                f"{self._where}: the chat template {problem}, so messages cannot be appended to the tokens that the "
                f"policy sampled. {remedy}."
            )
        name, self._training = found
        self.template_name = f"the training template {name}"
        log.info("%s: the chat template %s. Later turns use %s.", self._where, problem, self.template_name)

    def _find_stops(self) -> frozenset[int]:
        vocabulary = self._tokenizer.get_vocab()
        named = [vocabulary[token] for token in _MORE_STOPS.get(self.format_name, ()) if token in vocabulary]
        own = [] if self.format_name == HARMONY else [self._closing]
        eos = self._tokenizer.eos_token_id
        return frozenset([*named, *own, *([] if eos is None else [eos])])

    def _end_of(self, messages: Messages) -> int:
        """Return the special token that ends the marked turn."""
        tail = self._tokens(self._template.text(messages).partition(MARK)[2])
        end = next((token for token in tail if token in self._special), None)
        if end is None:
            raise UserError(
                f"{self._where}: the chat template prints no special token after a turn of the policy, so no turn can "
                "end. Set env.template to a template that ends turns with a special token."
            )
        return end

    def _after_turn(self, text: str) -> list[int]:
        """Return the tokens after the special token that ends the marked turn."""
        tail = self._tokens(text.partition(MARK)[2])
        return tail[next((i for i, token in enumerate(tail) if token in self._special), len(tail)) + 1 :]

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]
