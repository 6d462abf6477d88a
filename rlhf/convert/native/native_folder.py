"""Writes a native checkpoint from the tensors of any source; each backend loads it on any number of ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.manifest import Manifest, describe, write_manifest
from rlhf.checkpoint.commit.output_folder import output_folder, verify_written
from rlhf.checkpoint.start.run_dir import new_run_id
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.convert.moments import MOMENTS, largest_count
from rlhf.convert.native.native_component import write_component
from rlhf.convert.native.trained_tensors import TrainedTensor, trained_tensors
from rlhf.convert.open_roles import CRITIC
from rlhf.models.hf.hf_folder import plan_hf_folder
from rlhf.models.hf.hf_plan import HfOptions, HfPlan
from rlhf.models.hf.hf_writer import write_hf_folder
from rlhf.models.hf.named_tensors import zeros
from rlhf.models.hf.regrouped import as_trained
from rlhf.models.hf.source import FunctionTensor, ReadableTensor, TensorInfo, TensorSource
from rlhf.storage.files import WrittenFile, write_json
from rlhf.storage.layout import DRIVER_STATE, HF_FOLDER, SCHEDULE


@dataclass(frozen=True)
class RolePlan:
    """One model to write: its source, the trainer's names for its tensors, and the plan of its Hugging Face folder."""

    path: Path
    source: TensorSource
    """Tensors with the names and shapes that they have in training."""
    in_files: TensorSource
    """Tensors with the names and shapes that they have in the Hugging Face folder."""
    named: Mapping[str, TrainedTensor]
    hf: HfPlan

    @property
    def nbytes(self) -> int:
        weights = sum(tensor.info.nbytes for tensor in self.named.values())
        trained = sum(tensor.info.nbytes for tensor in self.named.values() if tensor.trained)
        return self.hf.nbytes + weights + (len(MOMENTS) * trained if self.source.contents.moments else 0)


@dataclass
class WrittenCheckpoint:
    """Result of a conversion. Each line of `converted` names state that was written. Each line of `absent` names state
    that starts anew."""

    path: Path
    manifest: Manifest
    converted: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def plan_native_folder(roles: Mapping[str, TensorSource], path: Path) -> dict[str, RolePlan]:
    """Plan the models at `path`, by role. Raises UserError for a model that is incomplete for its role."""
    plans = {}
    for role, source in roles.items():
        trained = as_trained(source)
        hf, in_files, tied = plan_hf_folder(source, path, HfOptions(value_model=role == CRITIC))
        files = source.contents.model_files
        assert files is not None  # the plan has read them
        kept = {name: info for name, info in trained.contents.tensors.items() if name not in tied}
        plans[role] = RolePlan(path, trained, in_files, trained_tensors(kept, files, path, role), hf)
    return plans


def write_native_folder(
    plans: Mapping[str, RolePlan],
    target: Path,
    step: int,
    *,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> WrittenCheckpoint:
    """Write the checkpoint `target` of `step`, verify it, and rename it into place.

    The weights are stored in float32, and in their own dtype in a Hugging Face folder. Weights without moments get zero
    moments if other weights have moments. Only one range of a tensor is in memory at a time.
    """
    done = WrittenCheckpoint(target, _manifest(step, plans))
    with output_folder(target, overwrite=overwrite, sources=[plan.path for plan in plans.values()]) as root:
        files = [write_json(root, DRIVER_STATE, DriverState(new_run_id(), step, 0.0, step=step).state_dict())]
        for role, plan in plans.items():
            files += _write_role(root, role, plan, done, progress)
        done.manifest.files.update(describe(files))
        verify_written(root, files)
        write_manifest(root, done.manifest)
    return done


def _write_role(
    root: Path, role: str, plan: RolePlan, done: WrittenCheckpoint, progress: Callable[[int], None]
) -> list[WrittenFile]:
    """Write the files of one role below `root`; add to `done` what was converted and what is absent."""
    source, have = plan.source, done.manifest.contents
    weights = {
        name: FunctionTensor(tensor.info, partial(source.read, tensor.source_name))
        for name, tensor in plan.named.items()
    }
    files = write_component(root, f"{role}/model", weights, progress)
    folder = f"{role}/{HF_FOLDER}"
    files += [
        replace(f, path=f"{folder}/{f.path}") for f in write_hf_folder(plan.in_files, plan.hf, root / folder, progress)
    ]
    done.converted.append(f"{role}: weights, {len(weights)} tensors")
    if source.contents.moments:
        moments, lacking = _moments(source, plan.named)
        files += write_component(root, f"{role}/optimizer", moments, progress)
        have += [] if "optimizer" in have else ["optimizer"]
        done.converted.append(f"{role}: AdamW's moments and step counts")
        if lacking:
            done.absent.append(f"{role}: moments of {len(lacking)} weights, such as {lacking[0]}, which begin at zero")
    if (position := _position(source)) is not None:
        # A load uses only these fields. The new run's settings determine the rates and the shape of the schedule.
        schedule = {"last_epoch": position, "_step_count": position + 1}
        steps = {"optimizer_step": position, "training_step": done.manifest.step}
        files.append(write_json(root, f"{role}/{SCHEDULE}", {"lr_scheduler": schedule, "steps_taken": steps}))
        have += [] if "extra" in have else ["extra"]
        done.converted.append(f"{role}: position in the learning rate schedule, after {position} optimizer steps")
    done.absent += [f"{role}: {line}" for line in source.contents.absent]
    return files


def _moments(source: TensorSource, named: Mapping[str, TrainedTensor]) -> tuple[dict[str, ReadableTensor], list[str]]:
    """Return the optimizer's state of all trained weights, and the names of the weights whose state `source` lacks."""
    state: dict[str, ReadableTensor] = {}
    lacking = []
    for name, tensor in named.items():
        if not tensor.trained:
            continue
        forms = {moment: TensorInfo(tensor.info.shape, torch.float32) for moment in MOMENTS}
        forms["step"] = TensorInfo((), torch.float32)
        stored = {moment: source.contents.moments.get(f"{tensor.source_name}.{moment}") for moment in forms}
        complete = all(info is not None and info.numel == forms[moment].numel for moment, info in stored.items())
        if not complete:
            lacking.append(name)
        for moment, info in forms.items():
            read = partial(source.read, f"{tensor.source_name}.{moment}")
            state[f"{name}.{moment}"] = FunctionTensor(info, read) if complete else zeros(info)
    return state, lacking


def _position(source: TensorSource) -> int | None:
    """Return the schedule's position in optimizer steps, or None if it is unknown.

    Use the schedule's own count only as a last resort, because some tools' schedules do not count optimizer steps.
    """
    progress = source.contents.progress
    if progress.optimizer_steps is not None:
        return progress.optimizer_steps
    counts = [name for name in source.contents.moments if name.endswith(".step")]
    if counts:
        return largest_count(float(source.read(name, 0, 1)) for name in counts)
    last = None if progress.schedule is None else progress.schedule.get("last_epoch")
    return last if isinstance(last, int) else None


def _manifest(step: int, plans: Mapping[str, RolePlan]) -> Manifest:
    first = next(iter(plans.values()))
    identity = Identity.of_run(first.source.layout, "", {}, [1])
    return Manifest(
        step=step,
        world_size=1,
        contents=["model", "hf_model"],
        roles=sorted(plans),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **vars(identity),
        imported={"layout": first.source.layout, "path": str(first.path.absolute())},
    )
