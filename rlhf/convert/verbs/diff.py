"""Verb `diff`: compares two checkpoints of any layouts, setting by setting and tensor by tensor."""

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf.checkpoint.verbs.places import local_folder
from rlhf.checkpoint.verbs.shown import nonfinite_as_text, work_bar
from rlhf.convert.layouts import AUTO, backends
from rlhf.convert.verbs.options import add_model_files_option, check_paths
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, UserError
from rlhf.printable import printable

if TYPE_CHECKING:
    from rlhf.convert.differences import Compared, TensorDifference, ValueDifference
    from rlhf.models.hf.source import TensorSource

HELP = "compare two checkpoints: settings, driver state, weights and moments, by norm and largest difference"
DOCUMENTS, WEIGHTS, MOMENTS = "documents", "weights", "moments"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, type=local_folder, metavar=name.upper(), help="folder of a checkpoint of any layout")
        parser.add_argument(
            f"--backend_{name}", choices=backends(), default=AUTO, help=f"layout of {name.upper()} (default: auto)"
        )
    add_model_files_option(parser)
    parser.add_argument(
        "--only",
        action="append",
        choices=(DOCUMENTS, WEIGHTS, MOMENTS),
        help="compare only documents (settings, driver state), weights or moments; may be given several times",
    )
    parser.add_argument(
        "--largest",
        type=int,
        default=10,
        metavar="N",
        help="lines of each kind; tensors with the largest difference come first (default: 10; 0: all)",
    )
    parser.add_argument("--json", action="store_true", help="print all differences as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Return exit code 0 when everything compared is equal bit for bit, 1 otherwise."""
    if arguments.largest < 0:
        raise UserError(f"--largest {arguments.largest} is negative. Give the number of lines, or 0 for all.")
    check_paths([arguments.a, arguments.b], arguments.hf_model_path)
    from rlhf.checkpoint.export.layout_native import recognises
    from rlhf.convert.differences import documents, value_differences
    from rlhf.convert.open_roles import open_roles
    from rlhf.models.hf.source import Origin

    only = arguments.only or [DOCUMENTS, WEIGHTS, MOMENTS]
    # A native checkpoint needs no model files here. Give its own folder, because the folder `model.path` may be gone.
    given = arguments.hf_model_path
    origins = [Origin(p, given or (p if recognises(Origin(p)) else None)) for p in (arguments.a, arguments.b)]
    values: dict[str, list[ValueDifference]] = {}
    with open_roles(origins[0], arguments.backend_a) as a, open_roles(origins[1], arguments.backend_b) as b:
        if DOCUMENTS in only:
            of_a, of_b = documents(a), documents(b)
            values = {kind: value_differences(of_a.get(kind), of_b.get(kind)) for kind in of_a | of_b}
        tensors = _tensors(a, b, only)
    equal = not any(values.values()) and not any(compared.different for compared in tensors.values())
    if arguments.json:
        console.print_json(json.dumps(_as_json(equal, values, tensors)))
    else:
        for line in _lines(values, tensors, arguments.largest):
            console.print(printable(line))
    return EXIT_DONE if equal else EXIT_CRASHED


def _tensors(
    a: Mapping[str, "TensorSource"], b: Mapping[str, "TensorSource"], only: list[str]
) -> dict[str, "Compared"]:
    from rlhf.convert.differences import compare_tensors
    from rlhf.models.hf.source import TensorInfo, TensorSource

    def table(roles: Mapping[str, TensorSource], role: str, kind: str) -> Mapping[str, TensorInfo]:
        if role not in roles:
            return {}
        contents = roles[role].contents
        return contents.tensors if kind == WEIGHTS else contents.moments

    keys = [(role, kind) for role in {**a, **b} for kind in (WEIGHTS, MOMENTS) if kind in only]
    tables = {key: (table(a, *key), table(b, *key)) for key in keys}
    size = sum(info.nbytes for of_a, _ in tables.values() for info in of_a.values())
    found = {}
    with work_bar("compared", size) as progress:
        for (role, kind), pair in tables.items():
            if pair != ({}, {}):
                found[f"{role}'s {kind}"] = compare_tensors(a.get(role), b.get(role), pair, progress)
    return found


def _lines(values: "dict[str, list[ValueDifference]]", tensors: "dict[str, Compared]", largest: int) -> Iterator[str]:
    for kind, differences in values.items():
        differ = "1 value differs" if len(differences) == 1 else f"{len(differences)} values differ"
        yield f"{kind}: {differ if differences else 'equal'}"
        yield from _some([f"{d.key}: {d.a!r} | {d.b!r}" for d in differences], largest)
    for kind, compared in tensors.items():
        count, found = compared.tensors, compared.different
        yield f"{kind}: {len(found)} of {count} tensors differ" if found else f"{kind}: equal, {count} tensors"
        yield from _some([_line(d) for d in sorted(found, key=_weight)], largest)


def _some(lines: list[str], largest: int) -> Iterator[str]:
    yield from (f"  {line}" for line in lines[: largest or None])
    if largest and len(lines) > largest:
        yield f"  and {len(lines) - largest} more (--largest 0 shows all)"


def _weight(difference: "TensorDifference") -> tuple[bool, float, str]:
    """Return the sort key: missing or differently shaped tensors first, then NaN, then by the largest difference."""
    largest = difference.largest
    if largest is None:
        return False, 0.0, difference.name
    return True, -math.inf if math.isnan(largest) else -largest, difference.name


def _line(difference: "TensorDifference") -> str:
    forms = difference.a if difference.a == difference.b else f"{difference.a or '(none)'} | {difference.b or '(none)'}"
    line = f"{difference.name}: {difference.what}, {forms}"
    if difference.largest is None:
        return line
    norms = f"norm {difference.norm_a:.6g} | {difference.norm_b:.6g}"
    return f"{line}, {norms}, largest difference {difference.largest:.6g}"


def _as_json(equal: bool, values: "dict[str, list[ValueDifference]]", tensors: "dict[str, Compared]") -> dict[str, Any]:
    return {
        "equal": equal,
        "values": {kind: [asdict(d) for d in differences] for kind, differences in values.items()},
        "tensors": {
            kind: {"tensors": compared.tensors, "different": [nonfinite_as_text(asdict(d)) for d in compared.different]}
            for kind, compared in tensors.items()
        },
    }
