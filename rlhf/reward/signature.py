"""Determines a reward function's calling convention, and the fields of a sample that it reads.

Functions may follow verl's or TRL's conventions; the names of their parameters decide which.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

FIELDS = ("data_source", "ground_truth", "extra_info")
"""Fields of every row, even if its file lacks these columns."""
PROMPT = "prompt"
"""Name under which a function receives the prompt as it is in the data, whatever `data.prompt_key` is."""


class Convention(Enum):
    """A calling convention: the names of the arguments, and the number of samples per call."""

    SAMPLE = "sample"
    """verl's `compute_score`: one sample."""
    BATCH = "batch"
    """verl's batch reward manager: each argument is a list over all samples of a prompt."""
    TRL = "trl"
    """TRL: arguments are lists over all samples of a prompt. Each column of the rows is such a list, too."""


GIVEN = {
    Convention.SAMPLE: ("solution_str", "messages", *FIELDS),
    Convention.BATCH: ("solution_strs", "messages", *(f"{name}s" for name in FIELDS)),
    Convention.TRL: ("prompts", "completions", "completion_ids", "log_extra", "log_metric"),
}
"""Arguments that the trainer passes to a function besides columns of the rows and `reward.kwargs`."""
_USUAL = {
    Convention.SAMPLE: ("solution_str", *FIELDS),
    Convention.BATCH: ("solution_strs", *(f"{name}s" for name in FIELDS)),
    Convention.TRL: GIVEN[Convention.TRL],
}
"""Arguments in `GIVEN` that `**kwargs` receives, as in verl and TRL."""
_TRL = {"prompts", "completions", "completion_ids"}
_OTHER_RESPONSES = ("predict_str", "model_output", "completion")
"""Names of the response in functions that verl calls by position."""
_OTHER_ANSWER = "test_cases"
"""Name of the reference answer in verl's prime_code."""
_RESPONSES = ("solution_str", *_OTHER_RESPONSES, "solution_strs", "completions", "completion_ids")


@dataclass(frozen=True)
class Signature:
    named: tuple[str, ...]
    """Parameters that can be passed by keyword."""
    required: tuple[str, ...]
    """Parameters in `named` without a default."""
    positional: tuple[str, ...]
    """Positional-only parameters without a default."""
    rest: bool
    """Whether the function has `**kwargs`."""
    is_async: bool

    @classmethod
    def of_definition(cls, node: ast.FunctionDef | ast.AsyncFunctionDef) -> "Signature":
        args = node.args
        by_position = [a.arg for a in args.posonlyargs + args.args]
        needed = by_position[: len(by_position) - len(args.defaults)]
        only = [a.arg for a in args.posonlyargs]
        keywords = [a.arg for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
        return cls(
            (*(a.arg for a in args.args), *(a.arg for a in args.kwonlyargs)),
            (*(name for name in needed if name not in only), *keywords),
            tuple(name for name in needed if name in only),
            args.kwarg is not None,
            isinstance(node, ast.AsyncFunctionDef),
        )

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Signature":
        """Read the signature from the function. Assume that a function without a signature accepts any parameter."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            return cls((), (), (), True, False)
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            tuple(p.name for p in by_name),
            tuple(p.name for p in by_name if p.default is p.empty),
            tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty),
            any(p.kind is p.VAR_KEYWORD for p in parameters),
            inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        )

    @property
    def convention(self) -> Convention:
        """The convention of the first name found: `solution_str`, `solution_strs`, TRL's names; else SAMPLE."""
        if "solution_str" not in self.named and "solution_strs" in self.named:
            return Convention.BATCH
        if "solution_str" in self.named or _TRL.isdisjoint(self.named):
            return Convention.SAMPLE
        return Convention.TRL

    @property
    def renamed(self) -> dict[str, str]:
        """Name in verl's geo3k.py, math_verify.py or prime_code -> our name, for parameters whose names differ."""
        if self.convention is not Convention.SAMPLE or "solution_str" in self.named:
            return {}
        response = next((name for name in _OTHER_RESPONSES if name in self.named), None)
        if response is None:
            return {}
        is_answer = _OTHER_ANSWER in self.named and "ground_truth" not in self.named
        return {response: "solution_str"} | ({_OTHER_ANSWER: "ground_truth"} if is_answer else {})

    def accepts(self, name: str) -> bool:
        """Return whether the function receives `name`, an argument of its convention or of `reward.kwargs`."""
        given = GIVEN[self.convention]
        return name in self.named or (self.rest and (name not in given or name in _USUAL[self.convention]))

    def columns(self, kwargs: dict[str, Any]) -> Iterator[str]:
        """Yield the columns of the rows that are parameters."""
        known = (*GIVEN[self.convention], *self.renamed)
        yield from (name for name in self.named if name not in known and name not in kwargs)

    def needs(self, kwargs: dict[str, Any]) -> Iterator[str]:
        """Yield the columns that must exist, except the fields of every row."""
        yield from (name for name in self.columns(kwargs) if name in self.required and name not in (*FIELDS, PROMPT))

    def problem(self) -> str | None:
        """Return the end of a message on why the function cannot be called, or None if it can be called."""
        if self.positional:
            return f"takes {', '.join(self.positional)} by position only, but is called by keyword. Remove the /."
        if "queries" in self.named and _TRL.difference({"prompts"}).isdisjoint(self.named):
            return (
                "has OpenRLHF's parameters (queries, prompts, labels). Take completions for the responses, and the "
                "data's columns by their names, such as answer."
            )
        if not self.rest and _TRL.union(_RESPONSES).isdisjoint(self.named):
            return f"takes none of {', '.join(_RESPONSES)}, so it would not see the response. Add one, or **kwargs."
        return None
