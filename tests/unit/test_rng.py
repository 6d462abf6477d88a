import logging
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlhf.ranks.rng import rng_state, seed_everything, set_rng_state
from rlhf.storage.files import write_file
from rlhf.storage.shards import safetensors_chunks
from tests.support.checkpoints import equal_bits


@pytest.fixture(autouse=True)
def own_generators():
    """Give every test a fixed start, and the tests after it their own states back."""
    before = rng_state()
    seed_everything(3, 0)
    yield
    set_rng_state(before)


def draw() -> list:
    """Something from every generator, Gaussians (which are made in pairs) first."""
    return [
        random.gauss(0, 1),
        random.random(),
        random.getrandbits(77),
        np.random.randn(),
        np.random.rand(),
        np.random.randint(1 << 62),
        torch.randn(3).tolist(),
        torch.rand(1).item(),
        torch.randn(20).tolist(),
    ]


def through_a_file(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / write_file(folder, "rng.safetensors", safetensors_chunks(rng_state())).path)


@pytest.mark.parametrize("gaussians", [0, 1, 2, 3])
def test_round_trip_through_a_file_with_and_without_a_pending_gaussian(tmp_path, gaussians):
    for _ in range(gaussians):
        random.gauss(0, 1)
        np.random.randn()
    random.random()
    np.random.rand(700)
    assert (random.getstate()[2] is not None) == (np.random.get_state()[3] == 1) == bool(gaussians % 2)
    saved = through_a_file(tmp_path)
    assert equal_bits(saved, rng_state())
    wanted = [draw() for _ in range(3)]
    seed_everything(99, 7)
    draw()
    set_rng_state(saved)
    assert equal_bits(rng_state(), saved)
    assert [draw() for _ in range(3)] == wanted


def test_reading_a_state_does_not_move_it():
    first = rng_state()
    assert equal_bits(first, rng_state())
    wanted = draw()
    set_rng_state(first)
    rng_state()
    assert draw() == wanted


@pytest.mark.parametrize("lacking", ["python", "numpy", "torch"])
def test_a_generator_that_the_state_lacks_is_named_and_left_as_it_is(lacking, caplog):
    old = {name: value for name, value in rng_state().items() if not name.startswith(lacking)}
    draw()
    now = rng_state()
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        set_rng_state(old)
    after = rng_state()
    for name, value in after.items():
        assert equal_bits(value, now[name] if name.startswith(lacking) else old[name]), name
    [message] = caplog.messages
    assert all(name in message for name in now if name.startswith(lacking))
    assert "no RNG state for" in message


def test_a_whole_state_gives_no_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        set_rng_state(rng_state())
    assert caplog.messages == []


def test_seeds_differ_by_rank_and_by_seed_and_repeat():
    seen = []
    for seed, rank in ((0, 0), (0, 1), (1, 0), (2**32 - 1, 5)):
        seed_everything(seed, rank)
        first = draw()
        seed_everything(seed, rank)
        assert draw() == first
        seen.append(str(first))
    assert len(set(seen)) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_cuda_device_is_restored(tmp_path, caplog):
    devices = range(torch.cuda.device_count())
    for i in devices:
        torch.randn(5, device=f"cuda:{i}")
    saved = through_a_file(tmp_path)
    assert {f"torch.cuda.{i}" for i in devices} <= saved.keys()
    wanted = [torch.randn(9, device=f"cuda:{i}").tolist() for i in devices]
    torch.cuda.manual_seed_all(1)
    set_rng_state(saved)
    assert [torch.randn(9, device=f"cuda:{i}").tolist() for i in devices] == wanted
    del saved["torch.cuda.0"]
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        set_rng_state(saved)
    assert "torch.cuda.0" in caplog.text
