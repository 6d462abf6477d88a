"""State that one number of ranks saves and another number loads: exactly equal, also if rows do not divide by the
ranks."""

import logging
import tempfile
from pathlib import Path

import pytest
import torch

from rlhf.config import Config
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from tests.support.checkpoints import (
    equal_bits,
    files_of,
    make_backend,
    make_checkpointer,
    make_config,
    make_driver,
    resume,
    run_ranks,
    whole_state,
)
from tests.support.verified import verify

DEADLINE_S = 90
CONTENTS = ["model", "optimizer", "extra", "hf_model"]


def save(rank: int, config: Config) -> dict:
    """Train three steps, save, return the whole state."""
    backend = make_backend(1, train_steps=3)
    make_checkpointer(config, backend, 3, Coordinator(GlooTransport())).save(3)
    return whole_state(backend)


def load(rank: int, config: Config) -> dict:
    """Resume into other weights and moments. Return the whole state, the local sizes and the warnings."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("rlhf").addHandler(handler)
    backend = make_backend(2, train_steps=1)
    step = resume(config, backend, Coordinator(GlooTransport()))
    sizes = {name: shard.local.numel() for name, shard in backend.model_shards().items()}
    return {"step": step, "state": whole_state(backend), "sizes": sizes, "warnings": warnings}


def go_on(rank: int, config: Config) -> dict:
    """Resume, and save the unchanged state as the next step."""
    backend = make_backend(2)
    driver = make_driver()
    checkpointer = make_checkpointer(config, backend, driver=driver)
    checkpointer.resume()
    driver.step += 1
    checkpointer.save(4)
    return whole_state(backend)


@pytest.fixture
def config(tmp_path) -> Config:
    config = make_config(tmp_path)
    config.checkpoint.contents = list(CONTENTS)
    return config


@pytest.fixture
def ranks(tmp_path):
    def run(world_size: int, function, config: Config) -> list:
        join = Path(tempfile.mkdtemp(dir=tmp_path))
        return run_ranks(world_size, function, config, deadline_s=DEADLINE_S, join=join)

    return run


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_state_is_exactly_equal_at_another_number_of_ranks(config, ranks, writers, readers):
    # Promise 15.
    saved, *others = ranks(writers, save, config)
    assert all(equal_bits(saved, other) for other in others)
    assert saved["optimizer"]["lm_head.weight.step"].item() == 3
    assert saved["extra"]["lr_scheduler"]["last_epoch"] == 3
    assert verify(config.run_dir / "global_step_3").world_size == writers

    loaded = ranks(readers, load, config)
    for rank, result in enumerate(loaded):
        assert result["step"] == 3
        assert equal_bits(result["state"], saved)
        warned = [line for line in result["warnings"] if f"has no RNG state for rank {writers} and above" in line]
        assert len(warned) == (rank == writers)
    by = "1 rank" if writers == 1 else f"{writers} ranks"
    assert any(f"saved by {by} and continues with {readers}" in line for line in loaded[0]["warnings"])
    # The weights are really sharded: the 515 rows of the vocabulary divide by neither 2 nor 3.
    sizes = [result["sizes"]["lm_head.weight"] for result in loaded]
    assert sum(sizes) == 515 * 12
    assert len(set(sizes)) == (1 if readers == 1 else 2)


def test_loading_on_one_rank_and_again_on_two_changes_no_bit(config, ranks):
    saved = ranks(2, save, config)[0]
    ranks(1, go_on, config)
    back = ranks(2, load, config)[0]
    assert back["step"] == 4
    assert equal_bits(back["state"], saved)


def test_ranks_without_a_row_save_and_load(config, ranks):
    """The hidden size is 12 (three heads of four). With 8 ranks, the last two have no element of a norm."""
    saved = ranks(8, save, config)[0]
    files = files_of(config.run_dir / "global_step_3")
    assert sum(name.startswith("actor/model/rank_") for name in files) == 8
    result = ranks(1, load, config)[0]
    assert equal_bits(result["state"], saved)
    state = torch.cat([tensor.flatten() for tensor in result["state"]["model"].values()])
    assert state.isfinite().all()
