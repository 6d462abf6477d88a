"""Verb `convert`: a checkpoint of any layout as one of another, by one process on the CPU."""

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf.checkpoint.commit.output_folder import output_folder, prove
from rlhf.checkpoint.verbs.places import local_folder
from rlhf.checkpoint.verbs.work_bar import work_bar
from rlhf.convert.verbs.hf_output import DTYPES, tell, to_hf_folder
from rlhf.convert.verbs.native_output import tell_start, to_native_folder
from rlhf.convert.verbs.origins import add_cpu_option, add_layout_options, check_places
from rlhf.errors import UserError

if TYPE_CHECKING:
    from rlhf.models.hf.source import Origin, TensorSource

NAME = "convert"
HELP = "make a Hugging Face folder, a checkpoint of ours, of torch DCP or of Megatron out of any other"
HF, NATIVE, DCP, MEGATRON = "hf", "native", "dcp", "megatron"
ONLY_FOR = {
    "dtype": (HF, DCP, MEGATRON),
    "tp": (MEGATRON,),
    "pp": (MEGATRON,),
    "megatron_layout": (MEGATRON,),
    "role": (HF, DCP, MEGATRON),
}
"""Options that not every output knows, with those that do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `rlhf.checkpoint.__main__.VERBS`. verl's users know `--hf_model_path` and `--output_path` alone."""
    parser.add_argument(
        "source", type=local_folder, nargs="?", metavar="SOURCE", help="folder of a checkpoint of any layout"
    )
    parser.add_argument("target", type=local_folder, nargs="?", metavar="TARGET", help="the folder to write")
    parser.add_argument("--to", choices=(HF, NATIVE, DCP, MEGATRON), required=True, help="what TARGET is to be")
    add_layout_options(parser)
    parser.add_argument(
        "--output_path", "--output-path", type=local_folder, metavar="DIR", help="TARGET, as verl names it"
    )
    parser.add_argument("--role", help="model of a checkpoint with several: actor (default), critic")
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights; without it each keeps its type")
    for name, what in (("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} parallel ranks of Megatron (1)")
    parser.add_argument(
        "--megatron-layout",
        choices=("torch_dist", "mp_rank"),
        help="torch_dist: megatron-core's, loads at any number of ranks (default); mp_rank: a file for each rank",
    )
    add_cpu_option(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the target if it is there")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write TARGET."""
    source, target = _places(arguments)
    for name, known in ONLY_FOR.items():
        if getattr(arguments, name) is not None and arguments.to not in known:
            option = name.replace("_", "-")
            raise UserError(f"--{option} is for --to {' or '.join(known)}, not for --to {arguments.to}. Leave it out.")
    check_places([source], arguments.hf_model_path, target, arguments.overwrite)
    from rlhf.models.hf.hf_plan import HfOptions
    from rlhf.models.hf.source import Origin

    role = arguments.role or "actor"
    origin = Origin(source, arguments.hf_model_path, role=role, tag=arguments.tag, adapter="merge")
    if arguments.to == NATIVE:
        made = to_native_folder(origin, arguments.backend, target, arguments.overwrite)
        return tell_start(made, arguments.json, console)
    if arguments.to == HF:
        options = HfOptions(arguments.dtype, value_model=role == "critic")
        made = to_hf_folder(origin, arguments.backend, options, target, arguments.overwrite)
    else:
        made = _to_others(origin, target, arguments)
    return tell(made, arguments.json, console)


def _places(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """SOURCE and TARGET, or what verl's options say in their places."""
    source, target = arguments.source or arguments.hf_model_path, arguments.target or arguments.output_path
    if source is None or target is None:
        raise UserError("Give SOURCE and TARGET, or --hf_model_path and --output_path.")
    if None not in (arguments.target, arguments.output_path):
        raise UserError(f"--output_path={arguments.output_path} and {arguments.target}: give one target.")
    return source, target


def _to_others(origin: "Origin", target: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from rlhf.convert.dcp.dcp_folder import nbytes_of_dcp, write_dcp_folder
    from rlhf.convert.layouts import open_source
    from rlhf.convert.megatron.megatron_folder import write_megatron_folder

    dtype, moments = arguments.dtype, arguments.to == DCP
    with closing(open_source(origin, arguments.backend)) as source:
        with output_folder(target, overwrite=arguments.overwrite, sources=_sources(origin)) as folder:
            with work_bar(f"{target}", nbytes_of_dcp(source, dtype=dtype, moments=moments)) as progress:
                if arguments.to == DCP:
                    written = write_dcp_folder(source, folder, dtype=dtype, progress=progress)
                else:
                    written = write_megatron_folder(
                        source,
                        folder,
                        tensor_ranks=1 if arguments.tp is None else arguments.tp,
                        pipeline_ranks=1 if arguments.pp is None else arguments.pp,
                        layout=arguments.megatron_layout or "torch_dist",
                        dtype=dtype,
                        progress=progress,
                    )
            prove(folder, written)
        return _outcome(source, target, dtype)


def _sources(origin: "Origin") -> list[Path]:
    return [origin.path, *([origin.model_files] if origin.model_files else [])]


def _outcome(source: "TensorSource", target: Path, dtype: str | None = None) -> dict[str, Any]:
    """What `--json` prints, of a target that is there."""
    infos = source.contents.tensors.values()
    kept = {str(info.dtype).removeprefix("torch.") for info in infos}
    files = {str(path.relative_to(target)): path.stat().st_size for path in sorted(target.rglob("*")) if path.is_file()}
    return {
        "target": str(target),
        "layout": source.layout,
        "tensors": len(infos),
        "bytes": sum(files.values()),
        "dtypes": sorted(kept) if dtype is None else [dtype],
        "files": files,
    }
