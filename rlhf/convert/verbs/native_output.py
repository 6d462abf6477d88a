"""Checkpoint of our own as the output of a verb: read, planned, written beside its place, proven and renamed."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf.checkpoint.commit.output_folder import step_named
from rlhf.checkpoint.verbs.shown import size_text
from rlhf.checkpoint.verbs.work_bar import work_bar
from rlhf.errors import EXIT_DONE
from rlhf.printable import printable

if TYPE_CHECKING:
    from rlhf.models.hf.source import Origin

OF_NO_TOOL = (
    "the generators of random numbers, which follow from trainer.seed",
    "the place in the training prompts, which begin at the first",
    "the KL controller, the guards, the metric history and the counts of tokens and samples",
    "the learning rate, the shape of its schedule and AdamW's settings, which are the run's own",
    "the reference policy, which is what model.path of the run holds: name the base model there to keep that",
)
"""What no other tool keeps as a run of ours needs it."""


def to_native_folder(origin: "Origin", backend: str, target: Path, overwrite: bool = False) -> dict[str, Any]:
    """Write all models of a checkpoint as the checkpoint `target` of ours; returns what `--json` prints."""
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
        "taken": done.taken,
        "absent": [*done.absent, *OF_NO_TOOL],
        "start": [
            f"model.path={target / 'actor' / 'huggingface'}",
            *critic,
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={target}",
        ],
    }


def tell_start(result: dict[str, Any], as_json: bool, console: Console) -> int:
    """Print what was written, what was not there, and how a run begins at it; the exit code."""
    if as_json:
        console.print_json(json.dumps(result))
        return EXIT_DONE
    size = size_text(result["bytes"])
    lines = [f"{result['target']}: {size}, from a checkpoint of layout {result['layout']}", "A new run takes over:"]
    lines += [f"  {line}" for line in result["taken"]]
    lines += ["It begins anew, and is not that run continued to the bit:", *(f"  {line}" for line in result["absent"])]
    lines += ["Begin it with (and your data, reward and other settings, under a trainer.experiment_name of its own):"]
    lines += [f"  python -m rlhf.train {' '.join(result['start'])}"]
    for line in lines:
        console.print(printable(line))
    return EXIT_DONE
