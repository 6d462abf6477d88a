"""Records each rank's restored state after a resume, and its state after the last step (RLHF_EVENT_LISTENER).

Tensors are gathered over the ranks and recorded as hashes of names, types, shapes and values, independent of file
formats.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf.checkpoint.load import resume
from rlhf.checkpoint.load.locations import FileLocations
from rlhf.checkpoint.state.run_state import RunState
from rlhf.events import LISTENER_VARIABLE
from rlhf.experience.groups import Group, from_tensors
from rlhf.ranks.rng import rng_state
from tests.support.digests import of_tensors
from tests.support.engines import gathered

FOLDER_VARIABLE = "RLHF_TEST_RESTORED_STATE"

_load_state = resume.load_state
_state: RunState | None = None


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a start whose ranks record to `folder`/restored_R.json and `folder`/final_R.json."""
    folder.mkdir()
    return {FOLDER_VARIABLE: str(folder), LISTENER_VARIABLE: f"{__name__}:on_event"}


def recorded(folder: Path, name: str) -> list[Any]:
    """Return the ranks' records `name`, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}_*.json"))]


def on_event(event: str) -> None:
    """Record the final tensors after the update of the run's last step."""
    driver = None if _state is None else _state.driver
    if event == "update.after" and driver is not None and driver.step + 1 == driver.total_steps:
        _write("final", {"tensors": _tensors(_state)})


def _recording(located: FileLocations, state: RunState, *arguments: Any) -> Any:
    global _state
    result = _load_state(located, state, *arguments)
    # First, because gathering must not change the random generators that the resume restored.
    generators = of_tensors(rng_state().items())
    carried = from_tensors(dict(state.carried.tensors())) if state.carried is not None else []
    _state = state
    record = {
        "step": located.manifest.step,
        "tensors": _tensors(state),
        "schedules": {name: role.extra_state() for name, role in state.roles.items()},
        "driver": state.driver.state_dict(),
        "parts": {name: part.state_dict() for name, part in state.stateful.items()},
        "generators": generators,
        "carried": [as_plain(group) for group in carried],
    }
    _write("restored", record)
    return result


if FOLDER_VARIABLE in os.environ:  # in a rank, before its resume
    resume.load_state = _recording


def _tensors(state: RunState) -> dict[str, str]:
    """Return hashes of each role's weights and optimizer, and of the moving reference. Collective."""
    parts = {f"{name}/model": role.model_shards() for name, role in state.roles.items()}
    parts |= {f"{name}/optimizer": role.optimizer_shards() for name, role in state.roles.items()}
    if state.reference is not None:
        parts["ref/model"] = state.reference.shards()
    return {name: of_tensors(gathered(shards).items()) for name, shards in parts.items()}


def as_plain(group: Group) -> dict[str, Any]:
    """Return a carried group in JSON's types, without rounding."""
    return {
        "uid": group.uid,
        "prompt_ids": [int(token) for token in group.prompt_ids],
        "samples": [
            {
                "token_ids": [int(token) for token in sample.token_ids],
                "log_probs": [float(log_prob) for log_prob in sample.log_probs],
                "finish_reason": sample.finish_reason,
                "version": sample.version,
            }
            for sample in group.samples
        ],
        "scores": [float(score) for score in group.scores],
    }


def _write(name: str, record: Any) -> None:
    path = Path(os.environ[FOLDER_VARIABLE]) / f"{name}_{dist.get_rank()}.json"
    path.write_text(json.dumps(record, sort_keys=True))
