"""Finds the training template for a tokenizer whose chat template rewrites earlier turns.

A training template renders what follows the first generation prompt; the tokenizer's own template renders the prompt.
A family is recognised if both templates render the same text after a turn, for a user message and for tool results.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rlhf.data.turns.rendering import (
    ASKED,
    MARK,
    ContinuationRenderer,
    Messages,
    TemplateRenderer,
    answer,
    raised_by_templates,
)

FOLDER = Path(__file__).parent / "templates"
NEXT: Mapping[str, Any] = {"role": "user", "content": " Next\n"}
"""A user message with whitespace at both ends, to see whether a template strips it."""


@dataclass(frozen=True)
class Family:
    """A training template, and how to recognise the chat templates of its model family.

    marks: texts that all these chat templates contain.
    switches: boolean variables of the training template that select its variant.
    """

    name: str
    marks: tuple[str, ...]
    switches: tuple[str, ...] = ()
    calls: str = ""
    """Name of the template variable that selects calls as `<function=`; empty if the family writes calls in one way."""

    def variants(self, source: str) -> Iterator[dict[str, bool]]:
        """Yield the settings of the training template that may fit the chat template `source`."""
        fixed = {"xml_calls": "<function=" in source} if self.calls else {}
        for values in product((False, True), repeat=len(self.switches)):
            yield fixed | dict(zip(self.switches, values, strict=True))


FAMILIES = (
    Family("qwen", ("<|im_start|>", "<|im_end|>"), ("trims",), calls="xml_calls"),
    Family("llama3", ("<|start_header_id|>", "<|eot_id|>")),
    Family("mistral", ("[INST]", "[TOOL_CALLS]"), ("spaces",)),
    Family("mistral_args", ("[INST]", "[ARGS]"), ("call_ids",)),
    Family("harmony", ("<|start|>", "<|channel|>", "<|message|>")),
)


def training_template(
    tokenizer: Any, template: TemplateRenderer, tools: Messages, after_turn: Callable[[str], list[int]]
) -> tuple[str, ContinuationRenderer] | None:
    """Return the name and renderer of the training template for the tokenizer, or None if no template fits.

    Args:
        after_turn: returns the tokens after the end of the marked turn in a rendering.
    """
    for family in FAMILIES:
        if not all(mark in template.source for mark in family.marks):
            continue
        text = (FOLDER / f"{family.name}.jinja").read_text(encoding="utf-8")
        for settings in family.variants(template.source):
            renderer = ContinuationRenderer(tokenizer, text, settings, template.generation_prompt())
            if _agree(template, renderer, tools, after_turn):
                return family.name, renderer
    return None


def _agree(
    template: TemplateRenderer, ours: ContinuationRenderer, tools: Messages, after_turn: Callable[[str], list[int]]
) -> bool:
    """Return whether both renderers print the same text after a turn.

    Renders no tool schemas: some templates, such as Mistral's, print the schemas before the last user message.
    """
    for messages in _continuations(tools):
        dummy = answer(MARK, results=[each for each in messages if each["role"] == "tool"])
        try:
            theirs = template.text([ASKED, dummy, *messages])
        except raised_by_templates():
            return False
        if after_turn(theirs) != after_turn(ours.text([dummy, *messages])):
            return False
    return True


def _continuations(tools: Messages) -> Iterator[list[Mapping[str, Any]]]:
    yield [NEXT]
    if tools:
        name = tools[0]["function"]["name"]
        yield [{"role": "tool", "name": name, "tool_call_id": "call00001", "content": ' "1"\n'}]
