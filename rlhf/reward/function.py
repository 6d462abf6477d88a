"""Checks the user's functions in `reward.functions`, `path/to/file.py:name`, without running the file."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.reward import REWARD_MODEL, VERIFIERS, RewardConfig
from rlhf.config.user_functions import find_definition
from rlhf.errors import UserError, did_you_mean, nearest
from rlhf.reward.signature import GIVEN, PROMPT, Convention, Signature

SETTING = "reward.functions"
NAMES = (*VERIFIERS, REWARD_MODEL)


def signature_in_file(spec: str) -> Signature | None:
    """Return the signature of the function `spec`; None if no `def` in the file binds its name, as for an import. Raise
    UserError if the file is missing or is not valid Python, or the name is not in it."""
    found = find_definition(SETTING, spec)
    return None if found is None else Signature.of_definition(found)


def check_function(spec: str) -> None:
    """Raise UserError as `signature_in_file`, and for a function that would not receive the response."""
    signature = signature_in_file(spec)
    if signature is not None and (problem := signature.problem()):
        raise UserError(f"{SETTING}={spec}: the function {problem}")


def check_kwargs(config: RewardConfig) -> None:
    """Raise UserError for `reward.kwargs` that no function accepts, or that would replace the trainer's arguments."""
    signatures = [signature_in_file(function) for function in config.functions if function not in NAMES]
    known = [each for each in signatures if each is not None]
    for name in config.kwargs:
        kwarg = f"reward.kwargs={config.kwargs}: {name}"
        if any(name in (*GIVEN[each.convention], *each.renamed, PROMPT) for each in known):
            raise UserError(f"{kwarg} is an argument that the trainer passes. Use another name.")
        # The parameters of an imported function are unknown before its file runs.
        if None not in signatures and not any(each.accepts(name) for each in known):
            named = [parameter for each in known for parameter in each.named]
            near = did_you_mean(nearest(name, named))
            raise UserError(
                f"{kwarg} is not a parameter of any of reward.functions={config.functions}.{near} Correct it."
            )


@dataclass(frozen=True)
class WantedColumns:
    """Columns of the data that reward functions read, besides the prompt and the answer."""

    every: bool = False
    """Whether a function reads all columns."""
    named: frozenset[str] = frozenset()
    required: tuple[tuple[str, str], ...] = ()
    """Columns without which a function cannot be called, each with the function."""

    @classmethod
    def of(cls, config: RewardConfig) -> "WantedColumns":
        every, named, required = False, set[str](), list[tuple[str, str]]()
        for function in config.functions:
            if function in NAMES:
                continue
            signature = signature_in_file(function)
            if signature is None:
                every = True
                continue
            trl = signature.convention is Convention.TRL
            every = every or (trl and signature.rest)
            named.update([PROMPT] * trl, signature.columns(config.kwargs))
            required += [(name, function) for name in signature.needs(config.kwargs)]
        return cls(every, frozenset(named), tuple(required))

    def reads(self, name: str) -> bool:
        return self.every or name in self.named

    def as_json(self) -> list[Any]:
        """Return everything that determines the columns of a row."""
        return [self.every, sorted(self.named), sorted(name for name, _ in self.required)]

    def of_record(self, record: dict[str, Any], prompt_key: str, where: str) -> dict[str, Any]:
        """Return a record's columns for the functions; raise UserError, naming `where`, if a required one is
        missing."""
        for name, function in self.required:
            if name not in record:
                raise UserError(
                    f"{where}: {SETTING}={function} takes {name}, and the row has no such column; it has "
                    f"{', '.join(record) or 'none'}.{did_you_mean(nearest(name, record))} Name a column, give {name} "
                    "a default, or set it in reward.kwargs."
                )
        by_name = {name for name in record if self.reads(name) and (name != prompt_key or name in self.named)}
        found = {name: value for name, value in record.items() if name in by_name}
        if self.reads(PROMPT) and prompt_key in record:
            found[PROMPT] = record[prompt_key]
        return found
