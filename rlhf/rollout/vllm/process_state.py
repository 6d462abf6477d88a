"""Restores the process state that vLLM changes, whenever the rank leaves vLLM."""

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo

from rlhf.ranks.rng import rng_state, set_rng_state

_memory: Any = torch.utils.deterministic
_FUNCTIONS: tuple[tuple[Any, Any], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)
"""Pairs of torch functions: one reads a setting, the other one writes it."""
_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (_memory, "fill_uninitialized_memory"),
    # vLLM for CPUs replaces these functions by empty ones.
    *((torch, "set_num_threads"), (torch.accelerator, "synchronize"), (torch.accelerator, "empty_cache")),
)


class ProcessState:
    """Switches between two process states: the rank's and vLLM's. At first, vLLM's is the rank's plus `environment`.

    A state has environment variables, torch's settings and patched functions, log handlers and signal handlers. Random
    number generators always stay as they were. On a GPU vLLM makes its own stream the current stream. The stream stays
    current, so training runs on it, too.

    Args:
        compiles: False disables torch.compile inside vLLM.
    """

    def __init__(self, environment: Mapping[str, str], *, compiles: bool) -> None:
        self._compiles = compiles
        self._variables: dict[str, str | None] = dict(environment)
        self._inside: dict[str, Any] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Switch to vLLM's state inside the context. Not reentrant."""
        variables, outside, rng = dict(os.environ), _read(), rng_state()
        _set_variables(self._variables)
        _write(outside | self._inside)
        # Deterministic mode would raise for operations without a deterministic version. vLLM fills its own memory.
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=True)
        _memory.fill_uninitialized_memory = False
        try:
            with nullcontext() if self._compiles else torch._dynamo.config.patch(disable=True):
                yield
        finally:
            seen = dict(os.environ)
            changed = {name for name in seen.keys() | variables.keys() if seen.get(name) != variables.get(name)}
            self._variables = {name: seen.get(name) for name in changed}
            _set_variables({name: variables.get(name) for name in changed})
            inside = _read()
            self._inside = {name: value for name, value in inside.items() if value != outside[name]}
            _write(outside)
            set_rng_state(rng)
            gc.unfreeze()  # vLLM freezes all existing objects, and Python would never collect the rank's garbage


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _read() -> dict[str, Any]:
    root = logging.getLogger()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    state: dict[str, Any] = {
        "deterministic": (torch.are_deterministic_algorithms_enabled(), warn_only),
        "handlers": (root.level, tuple(root.handlers)),
    }
    state |= {read.__name__: read() for read, _ in _FUNCTIONS}
    state |= {name: getattr(owner, name) for owner, name in _ATTRIBUTES}
    return state | {f"signal.{number}": signal.getsignal(number) for number in signal.valid_signals()}


def _write(state: Mapping[str, Any]) -> None:
    for read, write in _FUNCTIONS:
        write(state[read.__name__])
    enabled, warn_only = state["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    root = logging.getLogger()
    root.setLevel(state["handlers"][0])
    root.handlers[:] = state["handlers"][1]
    for owner, name in _ATTRIBUTES:
        setattr(owner, name, state[name])
    for number in signal.valid_signals():
        handler: Callable | int | None = state[f"signal.{number}"]
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
