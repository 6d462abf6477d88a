"""The matrix of the checkpoint format: saved by {FSDP2, ZeRO 0, 1, 2, 3} on {1, 2} ranks, opened by each of the same.

Weights, moments, step counts and the schedule are exactly equal; the next losses are within 1e-6, and the same bits where nothing changed.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config import Config
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, resume, run_ranks
from tests.support.engines import ENGINES, NEEDS_DEEPSPEED, loss_of, make_engine, state_of, train

pytestmark = [pytest.mark.slow, NEEDS_DEEPSPEED]

KINDS = ["fsdp2", "zero0", "zero1", "zero2", "zero3"]
LOW_PRECISION = ["fsdp2-bfloat16", "zero1-bfloat16", "zero3-bfloat16"]
RANKS = [1, 2]
DEADLINE_S = 500
STEPS = 3


def config_of(folder: str, kind: str, ranks: int) -> Config:
    config = make_config(Path(folder, f"{kind}-{ranks}"))
    config.backend = ENGINES[kind]
    return config


def save_all(rank: int, folder: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Train in every engine, save, and go on for a step: by kind, the saved state, and the losses before and after that step."""
    saved = {}
    for kind in [*KINDS, *LOW_PRECISION]:
        backend = make_engine(kind, seed=1)
        train(backend, *range(STEPS))
        checkpointer = make_checkpointer(config_of(folder, kind, ranks), backend, STEPS)
        checkpointer.save(STEPS)
        saved[kind] = {"state": state_of(backend), "losses": losses(backend)}
        checkpointer.finish()
    return saved


def open_all(rank: int, folder: str, ranks: int) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Open every checkpoint in every engine: by engine, writer and the writer's number of ranks, what `save_all` returns of it."""
    opened = {}
    for kinds in (KINDS, LOW_PRECISION):
        for kind in kinds:
            backend = make_engine(kind, seed=2)
            for writer, writers in itertools.product(kinds, RANKS):
                config = config_of(folder, writer, writers)
                config.backend = ENGINES[kind]
                assert resume(config, backend) == STEPS
                opened[kind, writer, writers] = {"state": state_of(backend), "losses": losses(backend)}
    return opened


def losses(backend: Any) -> torch.Tensor:
    """The loss on a batch, and on the next one after a step on the first."""
    before = loss_of(backend, STEPS)
    train(backend, STEPS)
    return torch.stack([before, loss_of(backend, STEPS + 1)])


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("portability")

    def on(ranks: int, function: Any) -> Any:
        first, *others = run_ranks(
            ranks, function, str(folder), ranks, deadline_s=DEADLINE_S, join=folder / f"{function.__name__}-{ranks}"
        )
        assert all(equal_bits(first, other) for other in others)
        return first

    saved = {ranks: on(ranks, save_all) for ranks in RANKS}
    return saved, {ranks: on(ranks, open_all) for ranks in RANKS}


CELLS = [
    pytest.param(writer, writers, reader, readers, id=f"{writer}x{writers}-{reader}x{readers}")
    for kinds in (KINDS, LOW_PRECISION)
    for writer, writers, reader, readers in itertools.product(kinds, RANKS, kinds, RANKS)
]


@pytest.mark.parametrize(("writer", "writers", "reader", "readers"), CELLS)
def test_opens(matrix, writer, writers, reader, readers):
    saved, opened = matrix[0][writers][writer], matrix[1][readers][reader, writer, writers]
    assert equal_bits(opened["state"], saved["state"])
    if (writer, writers) == (reader, readers):
        assert equal_bits(opened["losses"], saved["losses"])
    # A step on another number of ranks adds up in another order, and then rounds weights to bfloat16.
    later = 1e-2 if "bfloat16" in writer else 1e-6
    for tolerance, mine, theirs in zip((1e-6, later), opened["losses"], saved["losses"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


def test_the_saved_states_are_of_a_model_in_training(matrix):
    for kinds in matrix[0].values():
        for kind, saved in kinds.items():
            state = saved["state"]
            names = state["model"].keys()
            assert state["optimizer"].keys() == {f"{n}.{k}" for n in names for k in ("step", "exp_avg", "exp_avg_sq")}
            assert {float(state["optimizer"][f"{name}.step"]) for name in names} == {STEPS}, kind
            assert all(state["optimizer"][f"{name}.exp_avg"].abs().max() > 0 for name in names)
            assert all(tensor.dtype == torch.float32 for tensor in state["model"].values())
            assert state["extra"]["lr_scheduler"]["last_epoch"] == STEPS
            assert saved["losses"][0] != saved["losses"][1]
