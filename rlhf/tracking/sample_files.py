"""Writes a file of samples per step for users to read: some of its rollouts and all samples of its evaluation."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from rlhf.errors import UserError
from rlhf.printable import printable_lines
from rlhf.storage.files import make_dir, remove_file, replace_durably
from rlhf.storage.layout import SAMPLES

ROLLOUT, VALIDATION = "rollout", "validation"
GENERATIONS = "val/generations"
"""Name of the table in trackers, the same as verl's."""
_NAME = re.compile(r"step_(\d+)\.jsonl")

ShownSample = Mapping[str, Any]
"""One sample: `split` (`rollout` or `validation`), `uid` (the prompt's position) and `sample` (number within the
prompt), `data_source`, `prompt` and `response` (texts), `ground_truth`, `score` (whole reward), `rewards` (per reward
function), `extra` (the functions' further numbers, texts, lists), `advantage` (mean over the policy's tokens; null in a
validation), `length` (response tokens), `rows` (1, plus 1 each time an agent rewrote its history), `observations`
(spans [start, end) of response tokens that the policy did not write), `parts` (of an episode: pairs of writer
and text; else null; the writer is `policy`, `environment` or, if an agent rewrote the history, `history`), `tokens` (of
a rollout's first tokens: pairs of text and log-prob, which is null for a token of the environment; else null),
`finish_reason`, `version` (the number of training steps of the policy that drew the oldest token)."""


class SampleFiles:
    """Writes and reads `samples/step_N.jsonl` of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / SAMPLES

    def write(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Write the file of `step` atomically; write no file without samples."""
        if not samples:
            return
        make_dir(self._folder)
        lines = [json.dumps(sample, ensure_ascii=False, default=str) for sample in samples]
        content = "".join(f"{line}\n" for line in lines)
        # Ground truths come from users' files and may contain lone surrogates.
        replace_durably(self._folder / f"step_{step}.jsonl", content.encode(errors="surrogatepass"))

    def cut_after(self, step: int) -> None:
        """Remove the files of steps after `step`, which a resume or rollback will repeat."""
        for later in [each for each in self.steps() if each > step]:
            remove_file(self._folder / f"step_{later}.jsonl", missing_ok=True)

    def steps(self) -> list[int]:
        """Return the steps that have a file, ascending."""
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def read(self, step: int) -> Iterator[ShownSample]:
        """Yield the samples of `step`, if it has a file. Raises UserError for a line that is not a sample."""
        path = self._folder / f"step_{step}.jsonl"
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    sample = json.loads(line.decode(errors="surrogatepass"))
                except (ValueError, RecursionError):
                    sample = None
                if not _is_sample(sample):
                    raise UserError(
                        f"{path}, line {number}, is not a sample. Remove the file; the run does not need it."
                    )
                yield sample


def _is_sample(value: Any) -> TypeGuard[ShownSample]:
    """Return whether a line has the fields that tables show and sort by."""
    if not isinstance(value, dict) or not isinstance(value.get("response"), str):
        return False
    numbers = value.get("score"), value.get("advantage") or 0.0
    terms = value.get("rewards", {}), value.get("extra", {})
    return all(isinstance(n, int | float) for n in numbers) and all(isinstance(term, dict) for term in terms)


@dataclass(frozen=True)
class GenerationsTable:
    """Builds the table of an evaluation's samples for trackers, with at most `rows` rows."""

    files: SampleFiles
    rows: int

    COLUMNS = ("prompt", "response", "ground_truth", "score", "length", "finish_reason")

    def of(self, step: int) -> list[list[Any]]:
        """Return the rows of the evaluation after `step`; no rows without an evaluation."""
        answers = (sample for sample in self.files.read(step) if sample.get("split") == VALIDATION)
        return [[_cell(sample.get(name)) for name in self.COLUMNS] for sample in islice(answers, self.rows)]


def _cell(value: object) -> object:
    """Convert to a number or a text, the only types that trackers allow in a column."""
    return value if isinstance(value, int | float) else "" if value is None else str(value)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in HTML with escaped cells."""

    def line(cells: Sequence[object], tag: str) -> str:
        style = "white-space: pre-wrap; vertical-align: top; text-align: left"
        return "<tr>" + "".join(f'<{tag} style="{style}">{escape(str(cell))}</{tag}>' for cell in cells) + "</tr>"

    lines = "\n".join(line(row, "td") for row in rows)
    return f"<table>\n{line(columns, 'th')}\n{lines}\n</table>"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown with escaped cells."""

    def line(cells: Sequence[object]) -> str:
        texts = (escape(str(cell)).replace("|", "&#124;").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(columns), "|" + " --- |" * len(columns), *map(line, rows)])


def _response(sample: ShownSample) -> list[tuple[str, str]]:
    """Return the labelled texts of the response: of an episode, each turn and each answer of the environment."""
    parts = sample.get("parts")
    return [(f"> {who}", text) for who, text in parts] if parts else [("response", sample["response"])]


def as_text(sample: ShownSample) -> str:
    """Format a sample for a terminal, without control characters."""
    numbers = [f"score {sample['score']:.4g}"]
    if sample.get("advantage") is not None:
        numbers.append(f"advantage {sample['advantage']:+.4g}")
    terms = {**sample.get("rewards", {}), **sample.get("extra", {})}
    notes = {name: value for name, value in terms.items() if not isinstance(value, int | float)}
    numbers += [f"{name} {value:.4g}" for name, value in terms.items() if len(terms) > 1 and name not in notes]
    rows = f" in {sample['rows']} rows" if (sample.get("rows") or 1) > 1 else ""
    numbers.append(f"{sample.get('length')} tokens{rows} ({sample.get('finish_reason')})")
    head = f"{sample.get('split')} {sample.get('uid')}.{sample.get('sample')}: {', '.join(numbers)}"
    truth = sample.get("ground_truth")
    parts = [("prompt", sample.get("prompt")), *_response(sample), ("reference answer", truth)]
    parts += notes.items()
    shown = [f"  {name}: {part}".replace("\n", "\n    ") for name, part in parts if part is not None]
    return printable_lines("\n".join([head, *shown]))
