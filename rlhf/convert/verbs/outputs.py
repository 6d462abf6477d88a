"""Writes the folders of `convert`: each in a temporary folder beside its target, verified, then renamed."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf.checkpoint.commit.output_folder import output_folder, step_named, verify_written
from rlhf.checkpoint.verbs.shown import size_text, work_bar
from rlhf.errors import EXIT_DONE
from rlhf.printable import printable

if TYPE_CHECKING:
    from rlhf.models.hf.hf_plan import HfOptions
    from rlhf.models.hf.source import Origin

NEVER_IMPORTED = (
    "the random number generators, which are seeded from trainer.seed",
    "the position in the training prompts, which start at the first prompt",
    "the KL controller, the guards, the metric history and the counts of tokens and samples",
    "the learning rate, its schedule and AdamW's settings, which come from the new run's configuration",
    "the reference policy, which is the model in model.path: set model.path to the base model to keep it as reference",
)
"""Parts of a run that other tools' checkpoints lack."""


def to_hf_folder(
    origin: "Origin", backend: str, options: "HfOptions", target: Path, overwrite: bool = False
) -> dict[str, Any]:
    """Write the model of a checkpoint as the Hugging Face folder `target`. Return the fields of `--json`."""
    from rlhf.checkpoint.export.hf_work import hf_work
    from rlhf.convert.layouts import open_source
    from rlhf.storage.safetensors_header import TORCH_NAMES

    with (
        output_folder(target, overwrite=overwrite, sources=_sources(origin)) as folder,
        closing(open_source(origin, backend)) as source,
    ):
        if source.layout == "native":
            # A native checkpoint's own configuration fits its tensors; only other model files need a comparison.
            options = replace(options, compared=origin.model_files is not None)
        work = hf_work(source, origin.path, options)
        with work_bar(f"{target}", work.plan.nbytes) as progress:
            work.write(folder, progress)
    return {
        "target": str(target),
        "layout": source.layout,
        "tensors": len(work.plan.tensors),
        "bytes": work.plan.nbytes,
        "dtypes": sorted({TORCH_NAMES[kind] for kind, _ in work.plan.tensors.values()}),
        "files": _files(target),
    }


def to_other_folder(
    origin: "Origin", backend: str, to: str, options: dict[str, Any], target: Path, overwrite: bool
) -> dict[str, Any]:
    """Write a checkpoint as the torch DCP or Megatron (`to`) folder `target`. Return the fields of `--json`. `options`
    are the keyword arguments of `write_dcp_folder` or `write_megatron_folder`."""
    from rlhf.convert.dcp.dcp_folder import as_dcp, write_dcp_folder
    from rlhf.convert.layouts import open_source
    from rlhf.convert.megatron.megatron_folder import write_megatron_folder

    write, dtype = write_dcp_folder if to == "dcp" else write_megatron_folder, options["dtype"]
    with closing(open_source(origin, backend)) as source:
        written_tensors = as_dcp(source, dtype, moments=to == "dcp").contents.tensors
        size = sum(info.nbytes for info in written_tensors.values())
        with output_folder(target, overwrite=overwrite, sources=_sources(origin)) as folder:
            with work_bar(f"{target}", size) as progress:
                written = partial(write, **options)(source, folder, progress=progress)
            verify_written(folder, written)
        infos, files = source.contents.tensors.values(), _files(target)
        kept = {str(info.dtype).removeprefix("torch.") for info in infos}
    return {
        "target": str(target),
        "layout": source.layout,
        "tensors": len(infos),
        "bytes": sum(files.values()),
        "dtypes": sorted(kept) if dtype is None else [dtype],
        "files": files,
    }


def to_native_folder(origin: "Origin", backend: str, target: Path, overwrite: bool = False) -> dict[str, Any]:
    """Write all models of a checkpoint as the native checkpoint `target`. Return the fields of `--json`."""
    step = step_named(target, origin.path)
    from rlhf.convert.native.native_folder import plan_native_folder, write_native_folder
    from rlhf.convert.open_roles import open_roles

    with open_roles(origin, backend, trained=True) as roles:
        plans = plan_native_folder(roles, origin.path)
        with work_bar(f"{target}", sum(plan.nbytes for plan in plans.values())) as progress:
            done = write_native_folder(plans, target, step, overwrite=overwrite, progress=progress)
    target = target.absolute()
    critic = [f"critic.path={target / 'critic' / 'huggingface'}"] if "critic" in done.manifest.roles else []
    return {
        "target": str(target),
        "layout": done.manifest.imported["layout"],
        "step": step,
        "contents": done.manifest.contents,
        "bytes": done.manifest.total_bytes,
        "taken": done.converted,
        "absent": [*done.absent, *NEVER_IMPORTED],
        "start": [
            f"model.path={target / 'actor' / 'huggingface'}",
            *critic,
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={target}",
        ],
    }


def _sources(origin: "Origin") -> list[Path]:
    return [origin.path, *origin.parts, *([origin.model_files] if origin.model_files else [])]


def _files(target: Path) -> dict[str, int]:
    return {str(path.relative_to(target)): path.stat().st_size for path in sorted(target.rglob("*")) if path.is_file()}


def print_result(result: dict[str, Any], as_json: bool, console: Console) -> int:
    """Print the result, with the command that starts a run from a native checkpoint. Return the exit code."""
    if as_json:
        console.print_json(json.dumps(result))
        return EXIT_DONE
    for line in _lines_of_start(result) if "start" in result else [_line_of(result)]:
        console.print(printable(line))
    return EXIT_DONE


def _line_of(result: dict[str, Any]) -> str:
    return (
        f"{result['target']}: {result['tensors']} tensors ({', '.join(result['dtypes'])}), "
        f"{size_text(result['bytes'])} in {len(result['files'])} files, from a checkpoint of layout {result['layout']}"
    )


def _lines_of_start(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['target']}: {size_text(result['bytes'])}, from a checkpoint of layout {result['layout']}"
    yield "A new run continues with:"
    yield from (f"  {line}" for line in result["taken"])
    yield "The new run does not continue the old run bit for bit. These parts start anew:"
    yield from (f"  {line}" for line in result["absent"])
    yield "Start the new run as follows. Add your data, reward and other settings, and a new trainer.experiment_name:"
    yield f"  python -m rlhf.train {' '.join(result['start'])}"
