"""Saves and restores the random generators of one process (Python, NumPy, torch) as plain tensors, without pickle.

Only dropout and the user's code use these generators. Sampling does not: its noise is a function of seed, step, prompt,
sample and position.
"""

import logging
import random

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)


def rng_state() -> dict[str, Tensor]:
    """Return every generator's state. Python's state is 625 words of a Mersenne twister and the pending Gaussian."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert version == 3
    assert name == "MT19937"
    state = {
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy.keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy.position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
        "torch.cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state |= {f"torch.cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Restore the generators in `state`.

    Log a warning if `state` lacks generators of this process, for example for an additional CUDA device.
    """
    missing = rng_state().keys() - state.keys()
    if missing:
        log.warning("The checkpoint has no RNG state for %s; they keep their seeds.", ", ".join(sorted(missing)))
    if {"python.words", "python.gauss"} <= state.keys():
        gauss = state["python.gauss"].tolist()
        random.setstate((3, tuple(state["python.words"].tolist()), gauss[0] if gauss else None))
    if {"numpy.keys", "numpy.position", "numpy.gauss"} <= state.keys():
        position, has_gauss = state["numpy.position"].tolist()
        keys = state["numpy.keys"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy.gauss"].item()))
    if "torch.cpu" in state:
        torch.set_rng_state(state["torch.cpu"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"torch.cuda.{i}" in state:
            torch.cuda.set_rng_state(state[f"torch.cuda.{i}"], i)


def seed_everything(seed: int, rank: int) -> None:
    """Seed every generator of this process from the run's seed and the rank."""
    mixed = (seed * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
