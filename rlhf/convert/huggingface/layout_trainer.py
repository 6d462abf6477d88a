"""Reads layout `trainer`: `checkpoint-N` of the Trainer of transformers and of TRL, and folders of peft adapters.

The weights are a Hugging Face folder or an adapter's `adapter_model.safetensors`; beside them are `optimizer.pt`,
`scheduler.pt` and `trainer_state.json`. Layouts `deepspeed` and `dcp` read files that
DeepSpeed or FSDP wrote for the Trainer.
"""

import json
import re
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf.convert.huggingface import layout_huggingface
from rlhf.convert.moments import MOMENTS, Unmapped, with_updates
from rlhf.convert.stored_tensor import StoredTensor, open_torch_file
from rlhf.errors import UserError
from rlhf.models.hf import adapters
from rlhf.models.hf.architecture import architecture_of
from rlhf.models.hf.named_tensors import NamedTensors
from rlhf.models.hf.source import Contents, Origin, ReadableTensor, TrainedSoFar, tensors_of
from rlhf.models.loading import ModelSource, resolve_path
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hf_layout import MODEL_CONFIG

NAME = "trainer"
STATE, OPTIMIZER, SCHEDULE = "trainer_state.json", "optimizer.pt", "scheduler.pt"
ADAPTER, ADAPTER_CONFIG, OLD_ADAPTER = "adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"

Shapes = Mapping[str, tuple[int, ...]]
NOT_DECAYED: tuple[Callable[[str, tuple[int, ...]], bool], ...] = (
    lambda name, shape: len(shape) < 2,
    lambda name, shape: "bias" in name,
    lambda name, shape: bool(re.search(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", name)),
)
"""Functions that find parameters without weight decay, one for each rule that releases of the Trainer have used. These
parameters are the optimizer's second group."""


def recognises(origin: Origin) -> bool:
    """Return whether the folder has the Trainer's state or an adapter's configuration."""
    return (origin.path / STATE).is_file() or (origin.path / ADAPTER_CONFIG).is_file()


def open_source(origin: Origin) -> NamedTensors:
    """Open a checkpoint. Raises UserError for missing weights, and for an adapter without `--adapter`."""
    path = origin.path
    absent = ["the position in the training data and the state of the algorithm"]
    contents = Contents({}, progress=progress_of(path), absent=absent)
    if contents.progress.schedule is None:
        contents.absent.insert(0, f"the learning rate schedule: no {SCHEDULE}")
    if (path / ADAPTER_CONFIG).is_file():
        contents.absent.insert(0, "the optimizer's moments: they belong to the adapter's weights")
        return NamedTensors(NAME, _adapted(path, origin, contents), {}, contents)
    source = layout_huggingface.open_source(Origin(path, model_files=origin.model_files))
    tensors = tensors_of(source)
    contents.model_files = source.contents.model_files
    return NamedTensors(NAME, tensors, _moments(path, tensors, contents), contents)


def progress_of(path: Path) -> TrainedSoFar:
    """Return step and schedule from the Trainer's files in `path`, which its saves with DeepSpeed or FSDP also have."""
    step, schedule = None, None
    if (path / STATE).is_file():
        step = _json(path / STATE).get("global_step")
    if (path / SCHEDULE).is_file():
        schedule = open_torch_file(path / SCHEDULE)
    return TrainedSoFar(step, schedule=schedule if isinstance(schedule, dict) else None)


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise DamagedCheckpoint(f"{path} does not contain a JSON object")
    return document


def _adapted(path: Path, origin: Origin, contents: Contents) -> dict[str, ReadableTensor]:
    choice = adapters.adapter_choice(origin.adapter, path)
    config = _json(path / ADAPTER_CONFIG)
    file = ADAPTER if (path / ADAPTER).is_file() else OLD_ADAPTER
    if not (path / file).is_file():
        raise UserError(f"{path} has {ADAPTER_CONFIG} and lacks {ADAPTER}. Restore it.")
    open_weights = layout_huggingface.SafetensorsFolder if file == ADAPTER else layout_huggingface.open_pickles
    tensors = tensors_of(open_weights(path, {file: None}, path))
    if choice == adapters.KEEP:
        contents.adapter = config
        contents.model_files = origin.model_files or _local_base(config) or path
        return tensors
    contents.model_files = base = origin.model_files or _base(path, config)
    return adapters.merged(
        tensors_of(layout_huggingface.open_source(Origin(base))), adapters.Adapter(path, config, tensors)
    )


def _local_base(config: Mapping[str, Any]) -> Path | None:
    base = config.get("base_model_name_or_path")
    return Path(base) if isinstance(base, str) and (Path(base) / MODEL_CONFIG).is_file() else None


def _base(path: Path, config: Mapping[str, Any]) -> Path:
    """Return the base model's folder, downloaded if the adapter names a model of the Hub."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(f"{path / ADAPTER_CONFIG} does not name a base model. Set --hf_model_path to its folder.")
    return resolve_path(ModelSource("base_model_name_or_path", name, config.get("revision")))


def _moments(path: Path, tensors: Mapping[str, ReadableTensor], contents: Contents) -> dict[str, ReadableTensor]:
    try:
        if not (path / OPTIMIZER).is_file():
            raise Unmapped(f"no {OPTIMIZER}")
        architecture = architecture_of(contents.model_files) if contents.model_files else None
        if architecture is None:
            raise Unmapped("the order of the parameters is unknown, because transformers lacks the model")
        if unknown := [name for name in architecture.parameters if name not in tensors]:
            raise Unmapped(f"the weights have no {unknown[0]}")
        shapes = {name: tensors[name].info.shape for name in architecture.parameters}
        found = _named(open_torch_file(path / OPTIMIZER), shapes)
    except Unmapped as reason:
        contents.absent.insert(0, f"the optimizer's moments: {reason}")
        return {}
    contents.progress = with_updates(contents.progress, found)
    return found


def _named(optimizer: Any, shapes: Shapes) -> dict[str, ReadableTensor]:
    try:
        state, groups = optimizer["state"], [group["params"] for group in optimizer["param_groups"]]
    except (KeyError, TypeError):
        raise Unmapped(f"{OPTIMIZER} is not from an optimizer of torch") from None
    for entry in state.values():
        whole = isinstance(entry, dict) and all(isinstance(entry.get(key), StoredTensor) for key in (*MOMENTS, "step"))
        if not whole:
            raise Unmapped(f"the optimizer has {', '.join(map(str, entry))} per parameter and is not plain Adam")
    names = _order(groups, state, shapes)
    return {f"{names[i]}.{key}": entry[key] for i, entry in state.items() for key in (*MOMENTS, "step")}


def _order(groups: list[list[int]], state: Mapping[int, Any], shapes: Shapes) -> dict[int, str]:
    """Return the parameters' names by number in the optimizer. The group with weight decay is first."""
    for second in NOT_DECAYED if len(groups) == 2 else [lambda name, shape: False]:
        split: list[list[str]] = [[], []]
        for name, shape in shapes.items():
            split[second(name, shape)].append(name)
        if [len(names) for names in split[: len(groups)]] != [len(group) for group in groups]:
            continue
        order = dict(zip(chain(*groups), chain(*split), strict=True))
        if state.keys() <= order.keys() and all(
            entry[key].shape == shapes[order[i]] for i, entry in state.items() for key in MOMENTS
        ):
            return order
    raise Unmapped(f"groups of {' and '.join(str(len(group)) for group in groups)} parameters are not the Trainer's")
