"""Checkpoints saved by {FSDP2, ZeRO 0, 1, 2, 3} on {1, 2} ranks, and loaded by each of these; of whole models and of
adapters.

Weights, moments, step counts and the schedule are exactly equal; the next losses are within 1e-6, and the same bits
where nothing changed. A covering set of the pairs, or all of them with --full-product.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config import Config
from tests.support.adapted_engines import ADAPTED, engine_with_or_without_adapters
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, resume, run_ranks
from tests.support.engines import ENGINES, NEEDS_DEEPSPEED, loss_of, mean_loss_bound, state_of, train

pytestmark = NEEDS_DEEPSPEED

KINDS = ["fsdp2", "zero0", "zero1", "zero2", "zero3"]
LOW_PRECISION = ["fsdp2-bfloat16", "zero1-bfloat16", "zero3-bfloat16"]
ADAPTERS = ["fsdp2-lora", "zero0-lora", "zero2-lora"]
LOW_PRECISION_ADAPTERS = ["zero1-bfloat16-lora"]
FAMILIES = [KINDS, LOW_PRECISION, ADAPTERS, LOW_PRECISION_ADAPTERS]
EVERY_KIND = [kind for family in FAMILIES for kind in family]
RANKS = [1, 2]
DEADLINE_S = 500
STEPS = 3
# Engine and ranks of the writer, engine and ranks of the reader.
Cell = tuple[str, int, str, int]


def every_cell() -> list[Cell]:
    return [cell for kinds in FAMILIES for cell in itertools.product(kinds, RANKS, kinds, RANKS)]


def covering_cells() -> list[Cell]:
    """Return cells in which every engine loads every other engine's checkpoints, and saves and loads on one and on two
    ranks. Each engine also loads its own checkpoints, from one rank on one and after a change of ranks. On two ranks,
    only two engines resume their own here; test_deepspeed.py and test_lora.py resume the others."""
    cells = [(kind, 1, kind, 1) for kind in EVERY_KIND]
    cells += [(kind, 2, kind, 2) for kind in ("zero0-lora", "zero1-bfloat16-lora")]
    for kinds in FAMILIES:
        for first, distance in itertools.product(range(len(kinds)), range(len(kinds))):
            ranks = (1, 2) if first % 2 else (2, 1)
            if distance:
                ranks = ((1, 1), (1, 2), (2, 2), (2, 1))[(first + 2 * distance) % 4]
            writers, readers = ranks
            cells.append((kinds[first], writers, kinds[(first + distance) % len(kinds)], readers))
    # With adapters, each engine loads its own checkpoints from one rank on two, and from two ranks on one.
    cells += [(kind, ranks, kind, 3 - ranks) for kind in ADAPTERS for ranks in RANKS]
    return list(dict.fromkeys(cells))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", wanted_cells(metafunc.config), ids=lambda cell: "{}x{}-{}x{}".format(*cell))


def wanted_cells(config: pytest.Config) -> list[Cell]:
    return every_cell() if config.getoption("full_product") else covering_cells()


def config_of(folder: str, kind: str, ranks: int) -> Config:
    config = make_config(Path(folder, f"{kind}-{ranks}"))
    config.backend = ENGINES[kind.removesuffix(ADAPTED)]
    return config


def save_all(rank: int, folder: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Train in every engine, save, and train one more step. Return by kind the saved state, and the losses before and
    after that step."""
    saved = {}
    for kind in EVERY_KIND:
        backend = engine_with_or_without_adapters(kind, seed=1)
        train(backend, *range(STEPS))
        checkpointer = make_checkpointer(config_of(folder, kind, ranks), backend, STEPS)
        checkpointer.save(STEPS)
        saved[kind] = {"state": state_of(backend), "losses": losses(backend)}
        checkpointer.finish()
    return saved


def open_all(rank: int, folder: str, ranks: int, cells: list[Cell]) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Load the cells of `ranks` readers. Return state and losses by writer, writer's number of ranks, and reader."""
    opened = {}
    for kind in EVERY_KIND:
        backend = engine_with_or_without_adapters(kind, seed=2)
        for writer, writers, reader, readers in cells:
            if (reader, readers) == (kind, ranks):
                config = config_of(folder, writer, writers)
                config.backend = ENGINES[kind.removesuffix(ADAPTED)]
                assert resume(config, backend) == STEPS
                opened[writer, writers, kind] = {"state": state_of(backend), "losses": losses(backend)}
    return opened


def losses(backend: Any) -> torch.Tensor:
    """Return the loss on a batch, and the loss on the next batch after a step on the first."""
    before = loss_of(backend, STEPS)
    train(backend, STEPS)
    return torch.stack([before, loss_of(backend, STEPS + 1)])


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("portability")

    def on(ranks: int, function: Any, *arguments: Any) -> Any:
        join = folder / f"{function.__name__}-{ranks}"
        first, *others = run_ranks(ranks, function, str(folder), ranks, *arguments, deadline_s=DEADLINE_S, join=join)
        assert all(equal_bits(first, other) for other in others)
        return first

    saved = {ranks: on(ranks, save_all) for ranks in RANKS}
    return saved, {ranks: on(ranks, open_all, wanted_cells(request.config)) for ranks in RANKS}


def test_a_checkpoint_of_any_engine_and_rank_count_loads_in_any_other(matrix, cell):
    # Promise 15.
    writer, writers, reader, readers = cell
    saved, opened = matrix[0][writers][writer], matrix[1][readers][writer, writers, reader]
    assert equal_bits(opened["state"], saved["state"])
    if (writer, writers) == (reader, readers):
        assert equal_bits(opened["losses"], saved["losses"])
    # The weights have the same bits before the first loss. The step adds rounding errors from the order of its sums.
    first = mean_loss_bound(saved["losses"])
    # In bfloat16, a weight that is near the middle of two numbers after the step may be rounded to the other number.
    # The number of such weights is not known. 1e-2 allows for a few; all of them would change a loss by a few percent.
    later = 1e-2 if "bfloat16" in writer else 2 * first
    for tolerance, mine, theirs in zip((first, later), opened["losses"], saved["losses"], strict=True):
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
