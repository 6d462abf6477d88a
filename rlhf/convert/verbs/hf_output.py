"""Hugging Face folder as the output of a verb: read, planned, written beside its place, proven and renamed."""

import argparse
import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf.checkpoint.commit.output_folder import output_folder
from rlhf.checkpoint.verbs.shown import size_text
from rlhf.checkpoint.verbs.work_bar import work_bar
from rlhf.errors import EXIT_DONE
from rlhf.printable import printable

if TYPE_CHECKING:
    from rlhf.models.hf.hf_plan import HfOptions
    from rlhf.models.hf.source import Origin


DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Give a verb the options of the folder that it writes."""
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights; without it each keeps its type")
    parser.add_argument(
        "--max-shard-size", type=size_of, metavar="SIZE", help="most bytes of one file of weights, such as 2GB (5GB)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the target if it is there")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def size_of(text: str) -> int:
    """Bytes that a text such as 500MB or 2GiB means."""
    match = re.fullmatch(r"([0-9]+)([kmg]i?b)?", text, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 2GiB")
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


def to_hf_folder(
    origin: "Origin", backend: str, options: "HfOptions", target: Path, overwrite: bool = False
) -> dict[str, Any]:
    """Write the model of a checkpoint as the Hugging Face folder `target`; returns what `--json` prints."""
    from rlhf.checkpoint.export.hf_work import hf_work
    from rlhf.convert.layouts import open_source
    from rlhf.storage.shard_index import TORCH_NAMES

    sources = [origin.path, *origin.parts, *([origin.model_files] if origin.model_files else [])]
    with output_folder(target, overwrite=overwrite, sources=sources) as folder:
        with closing(open_source(origin, backend)) as source:
            if source.layout == "native":
                # It comes with the configuration that it was trained under, and its critic has a value head.
                own, critic = origin.model_files is None, origin.role == "critic"
                options = replace(options, compared=not own, value_model=options.value_model or critic)
            work = hf_work(source, origin.path, options)
            with work_bar(f"{target}", work.plan.nbytes) as progress:
                work.write(folder, progress)
            layout = source.layout
        written = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(folder)): path.stat().st_size for path in written}
    return {
        "target": str(target),
        "layout": layout,
        "tensors": len(work.plan.tensors),
        "bytes": work.plan.nbytes,
        "dtypes": sorted({TORCH_NAMES[kind] for kind, _ in work.plan.tensors.values()}),
        "files": files,
    }


def tell(result: dict[str, Any], as_json: bool, console: Console) -> int:
    """Print what was written; the exit code."""
    if as_json:
        console.print_json(json.dumps(result))
    else:
        size, files = size_text(result["bytes"]), len(result["files"])
        console.print(
            printable(
                f"{result['target']}: {result['tensors']} tensors ({', '.join(result['dtypes'])}), {size} in {files} "
                f"files, from a checkpoint of layout {result['layout']}"
            )
        )
    return EXIT_DONE
