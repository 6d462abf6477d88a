"""Verb `test`: compares a checkpoint with a reference model, tensor by tensor and by their logits."""

import argparse
import json
import math
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import Console

from rlhf.checkpoint.verbs.places import local_folder
from rlhf.checkpoint.verbs.shown import nonfinite_as_text, work_bar
from rlhf.convert.verbs.options import add_origin_options, check_paths
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, UserError
from rlhf.printable import printable

if TYPE_CHECKING:
    from rlhf.convert.differences import TensorDifference
    from rlhf.models.hf.architecture import Architecture
    from rlhf.models.hf.source import TensorSource

HELP = "compare a checkpoint or a merged model with a reference model, tensor by tensor and by their logits"
SHOWN = 20
"""Print at most this many lines about tensors; `--json` prints all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `rlhf.checkpoint.__main__.VERBS`. The options have verl's names."""
    add_origin_options(parser, required=True)
    parser.add_argument(
        "--test_hf_dir",
        "--test-hf-dir",
        type=local_folder,
        required=True,
        metavar="DIR",
        help="Hugging Face reference model",
    )
    parser.add_argument("--atol", type=float, default=0.0, help="largest difference that counts as equal (default: 0)")
    parser.add_argument(
        "--ignore-dtype", action="store_true", help="compare values only: different dtypes count as equal"
    )
    parser.add_argument(
        "--rows", type=int, default=2, help="rows of tokens whose logits are compared (default: 2; 0: none)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


@dataclass
class Verdict:
    """Result of a test: tensors that differ by more than `--atol`, and the largest differences."""

    tensors: int
    missing: list[str] = field(default_factory=list)
    """Tensors that only the reference has."""
    extra: list[str] = field(default_factory=list)
    """Tensors that only the checkpoint has."""
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    """Tensor -> its largest difference, if this exceeds `--atol`."""
    largest: float = 0.0
    logits: float | None = None
    """Largest difference; None if the logits were not compared."""
    equal: bool = True


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Return exit code 0 when everything compared is equal within `--atol`, 1 otherwise."""
    if not arguments.atol >= 0:
        raise UserError(f"--atol {arguments.atol} is not a valid tolerance. Give a number of 0 or more.")
    if arguments.rows < 0:
        raise UserError(f"--rows {arguments.rows} is negative. Give the number of rows, or 0 to compare no logits.")
    check_paths([*arguments.local_dir, arguments.test_hf_dir], arguments.hf_model_path)
    from rlhf.convert.layouts import open_source
    from rlhf.models.hf.source import Origin

    with closing(open_source(Origin(arguments.test_hf_dir), "huggingface")) as reference:
        first, *parts = arguments.local_dir
        given = arguments.hf_model_path, arguments.role, arguments.tag, arguments.adapter
        origin = Origin(first, *given, parts=tuple(parts))
        # A checkpoint without a configuration uses the reference's, unless an adapter needs its own base model.
        if origin.adapter != "merge":
            origin = replace(origin, model_files=origin.model_files or arguments.test_hf_dir)
        with closing(open_source(origin, arguments.backend)) as source:
            verdict = _verdict(arguments, source, reference)
    if arguments.json:
        console.print_json(json.dumps(nonfinite_as_text(asdict(verdict))))
    else:
        for line in _lines(verdict, arguments.atol):
            console.print(printable(line))
    return EXIT_DONE if verdict.equal else EXIT_CRASHED


def _verdict(arguments: argparse.Namespace, source: "TensorSource", reference: "TensorSource") -> Verdict:
    from rlhf.convert.differences import compare_tensors
    from rlhf.convert.logits import largest_difference
    from rlhf.models.hf.architecture import architecture_of

    architecture = architecture_of(arguments.test_hf_dir, value_model=arguments.is_value_model)
    if architecture is not None:
        source, reference = (_in_files(each, architecture) for each in (source, reference))
    tables = source.contents.tensors, reference.contents.tensors
    with work_bar("compared", sum(info.nbytes for info in tables[0].values())) as progress:
        compared = compare_tensors(source, reference, tables, progress)
    verdict = Verdict(compared.tensors)
    for difference in compared.different:
        _judge(verdict, difference, arguments.atol, arguments.ignore_dtype)
    fits = not (verdict.missing or verdict.extra or verdict.shapes)
    if arguments.rows and architecture is not None and fits:
        pair = (source, arguments.local_dir[0]), (reference, arguments.test_hf_dir)
        verdict.logits = largest_difference(*pair, architecture, arguments.rows)
    differences = (verdict.missing, verdict.extra, verdict.shapes, verdict.dtypes, verdict.values)
    verdict.equal = not any(differences) and (verdict.logits is None or verdict.logits <= arguments.atol)
    return verdict


def _in_files(source: "TensorSource", architecture: "Architecture") -> "TensorSource":
    """Return `source` with the tensor names of Hugging Face files, and only the first of two equal tied tensors."""
    from rlhf.models.hf.hf_folder import same_tensor
    from rlhf.models.hf.regrouped import as_in_files

    copies = architecture.copies_in(source.contents.tensors)
    return as_in_files(
        source, architecture.parts, without=[name for name, first in copies if same_tensor(source, name, first)]
    )


def _judge(verdict: Verdict, difference: "TensorDifference", atol: float, ignore_dtype: bool) -> None:
    forms = f"{difference.a} | {difference.b}"
    if difference.what == "only in A":
        verdict.extra.append(difference.name)
    elif difference.what == "only in B":
        verdict.missing.append(difference.name)
    elif difference.what == "shape":
        verdict.shapes[difference.name] = forms
    else:
        if difference.what == "dtype" and not ignore_dtype:
            verdict.dtypes[difference.name] = forms
        largest = math.nan if difference.largest is None else difference.largest
        verdict.largest = largest if math.isnan(largest) else max(verdict.largest, largest)
        if not largest <= atol:
            verdict.values[difference.name] = largest


def _lines(verdict: Verdict, atol: float) -> list[str]:
    found = [f"missing: {name}" for name in verdict.missing] + [f"extra: {name}" for name in verdict.extra]
    for what, forms in (("shape", verdict.shapes), ("dtype", verdict.dtypes)):
        found += [f"{what}: {name}, {form}" for name, form in forms.items()]
    by_size = sorted(verdict.values.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
    found += [f"values: {name}, largest difference {largest:.6g}" for name, largest in by_size]
    lines = found[:SHOWN] + ([f"and {len(found) - SHOWN} more (--json has all)"] if len(found) > SHOWN else [])
    logits = "not compared" if verdict.logits is None else f"largest difference {verdict.logits:.6g}"
    lines.append(f"{verdict.tensors} tensors, largest difference {verdict.largest:.6g}; logits: {logits}")
    if verdict.dtypes:
        lines.append("dtypes differ; set --ignore-dtype to compare values only")
    return [*lines, f"{'equal' if verdict.equal else 'NOT equal'} within {atol:g}"]
