"""Checkpoint of our own, written from the tensors of any source: each backend opens it, on any number of ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.manifest import Manifest, describe, write_manifest
from rlhf.checkpoint.driver_state import DriverState
from rlhf.checkpoint.interop.named_as_trained import TrainedTensor, named_as_trained
from rlhf.checkpoint.interop.native_component import Part, part_of, write_component, zeros
from rlhf.checkpoint.interop.source import TensorInfo, TensorSource
from rlhf.checkpoint.interop.target import output_folder, prove
from rlhf.checkpoint.start.run_dir import new_run_id
from rlhf.errors import UserError
from rlhf.storage.files import WrittenFile, write_json
from rlhf.storage.layout import DRIVER_STATE, SCHEDULE, step_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OpenRole:
    """One model of a checkpoint that is read, and where that lies."""

    path: Path
    source: TensorSource


@dataclass
class Import:
    """Outcome of `write_native_folder`: what was taken of each role, and what a run has to begin anew, a line each."""

    manifest: Manifest
    taken: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def write_native_folder(
    roles: Mapping[str, OpenRole],
    target: Path,
    *,
    overwrite: bool = False,
    told: Callable[[int], None] = lambda _: None,
) -> Import:
    """Write `roles` as the checkpoint `target`, which must be named `global_step_N`, and prove it.

    Weights become float32; of a role whose source has moments, those that it lacks are zero. One chunk of a tensor is
    in memory at a time. Raises UserError before anything is written when a source is not a whole model of its role.
    """
    step = step_of(target.absolute())
    if step is None:
        known = next((role.source.contents.progress.step for role in roles.values()), None)
        raise UserError(
            f"{target} must be named global_step_N, for the step N that a run begins after"
            + (f"; the source is at step {known}: {target}/global_step_{known}." if known is not None else ".")
        )
    named = {name: named_as_trained(role.source, role.path, name) for name, role in roles.items()}
    sources = [role.path for role in roles.values()]
    done = Import(_manifest(step, roles))
    with output_folder(target, overwrite=overwrite, sources=sources) as root:
        written = [write_json(root, DRIVER_STATE, DriverState(new_run_id(), step, 0.0, step=step).state_dict())]
        for name, role in roles.items():
            written += _write_role(root, name, role.source, named[name], done, told)
        done.manifest.files.update(describe(written))
        prove(root, written)
        write_manifest(root, done.manifest)
    return done


def _write_role(
    root: Path,
    role: str,
    source: TensorSource,
    named: Mapping[str, TrainedTensor],
    done: Import,
    told: Callable[[int], None],
) -> list[WrittenFile]:
    """Files of one role below `root`; what there is, and what there is not, is noted in `done`."""
    contents, have = source.contents, done.manifest.contents
    weights = [part_of(source, tensor.source_name, name, tensor.info) for name, tensor in named.items()]
    written = write_component(root, f"{role}/model", weights, told)
    done.taken.append(f"{role}: weights, {len(weights)} tensors")
    if unknown := sorted(contents.tensors.keys() - {tensor.source_name for tensor in named.values()}):
        done.absent.append(f"{role}: {len(unknown)} tensors that its model does not have, such as {unknown[0]}")
    if contents.moments:
        moments, lacking = _moments(source, named)
        written += write_component(root, f"{role}/optimizer", moments, told)
        have += [] if "optimizer" in have else ["optimizer"]
        done.taken.append(f"{role}: moments and step counts of AdamW")
        if lacking:
            done.absent.append(f"{role}: moments of {len(lacking)} weights, which begin at zero, such as {lacking[0]}")
    if (position := _position(source)) is not None:
        # What `LambdaLR` needs to go on; rates and shape are the run's own settings.
        schedule = {"lr_scheduler": {"last_epoch": position, "_step_count": position + 1}}
        written.append(write_json(root, f"{role}/{SCHEDULE}", schedule))
        have += [] if "extra" in have else ["extra"]
        done.taken.append(f"{role}: place in the learning-rate schedule, {position} optimizer steps")
    done.absent += [f"{role}: {line}" for line in contents.absent]
    return written


def _moments(source: TensorSource, named: Mapping[str, TrainedTensor]) -> tuple[list[Part], list[str]]:
    """The optimizer's state of all trained weights, and the weights of which `source` has none."""
    parts, lacking = [], []
    for name, tensor in named.items():
        if not tensor.trained:
            continue
        forms = {moment: TensorInfo(tensor.info.shape, torch.float32) for moment in MOMENTS}
        forms["step"] = TensorInfo((), torch.float32)
        there = all(_fits(source, f"{tensor.source_name}.{moment}", info) for moment, info in forms.items())
        if not there:
            lacking.append(name)
        for moment, info in forms.items():
            whole = f"{name}.{moment}"
            parts.append(
                part_of(source, f"{tensor.source_name}.{moment}", whole, info) if there else zeros(whole, info)
            )
    return parts, lacking


def _fits(source: TensorSource, name: str, wanted: TensorInfo) -> bool:
    found = source.contents.moments.get(name)
    return found is not None and found.numel == wanted.numel


def _position(source: TensorSource) -> int | None:
    """Optimizer steps that the schedule has come along; the schedules of some tools count something else."""
    progress = source.contents.progress
    if progress.optimizer_steps is not None:
        return progress.optimizer_steps
    counts = [name for name in source.contents.moments if name.endswith(".step")]
    if counts:
        return int(max(float(source.read(name, 0, 1)) for name in counts))
    last = None if progress.schedule is None else progress.schedule.get("last_epoch")
    return last if isinstance(last, int) else None


def _manifest(step: int, roles: Mapping[str, OpenRole]) -> Manifest:
    first = next(iter(roles.values()))
    identity = Identity.of_run(first.source.layout, "", {}, [1])
    return Manifest(
        step=step,
        world_size=1,
        backend=identity.backend,
        contents=["model"],
        roles=sorted(roles),
        config_hash=identity.config_hash,
        fingerprints=identity.fingerprints,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=identity.versions,
        threads=identity.threads,
        imported={"layout": first.source.layout, "path": str(first.path.absolute())},
    )
