"""Counts how often the host waits for the device in an update, and per decoded token. A wait leaves a GPU idle.

The test runs on the CPU. It counts the operations whose values or shape the host reads: on a GPU, these wait.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.backends.fsdp2 import Fsdp2Backend
from rlhf.backends.training import Training
from rlhf.config import ActorConfig, BackendConfig, GuardsConfig, OptimConfig, RolloutCorrectionConfig
from rlhf.learning.actor import Actor
from rlhf.learning.balancing import SampleBalance
from rlhf.learning.guards import Guards
from rlhf.models.packing import pack
from rlhf.rollout import SamplingParams
from rlhf.rollout.embedded import EmbeddedEngine
from rlhf.rollout.engine import Request
from tests.support.numeric_ranks import single_rank
from tests.support.tiny_models import causal_lm, tiny_tokenizer
from tests.support.tiny_updates import random_batch, tiny_qwen2

READS = ("aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.nonzero", "aten.masked_select")
CPU = torch.device("cpu")
SAMPLES = 6


class Waits(TorchDispatchMode):
    """Counts waits, and all operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        self.waits += str(function.overloadpacket) in READS
        if str(function.overloadpacket) in ("aten.index", "aten.index_put", "aten.index_put_"):
            self.waits += any(index is not None and index.dtype is torch.bool for index in args[1])
        self.operations += not function.is_view
        return result


class Copies(TorchFunctionMode):
    """Counts copies to the host in `waits`."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits.waits += function in (Tensor.cpu, Tensor.tolist)
        return function(*args, **kwargs or {})


@contextmanager
def counted() -> Iterator[Waits]:
    waits = Waits()
    with waits, Copies(waits):
        yield waits


def waits_of_update(budget: int, mini_batches: int) -> int:
    """Return the waits of the second update of a packed actor with at most `budget` tokens per micro-batch."""
    batch = random_batch(1, SAMPLES)
    batch.old_log_probs = batch.rollout_log_probs
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    balance = SampleBalance.owned(lengths, [0] * len(lengths), mini_batches, 1)
    model, correction = tiny_qwen2(), RolloutCorrectionConfig()
    pack(model)
    backend = Fsdp2Backend(model, BackendConfig(), CPU, Training(OptimConfig(), 1.0, 10))
    config = ActorConfig(ppo_max_token_len_per_gpu=budget)
    actor = Actor(backend, config, correction, temperature=1.0, scale=1, log_prob_budget=budget)
    guards = Guards(GuardsConfig())
    actor.update(batch, balance, guards)
    batch.__dict__.pop("sizes")
    with counted() as found:
        actor.update(batch, balance, guards)
    return found.waits


def test_an_update_waits_for_its_metrics_alone() -> None:
    with single_rank():
        found = {(budget, count): waits_of_update(budget, count) for budget in (1000, 1) for count in (1, 3)}
    # An update waits for the engine's log-probs and the samples' sizes. A mini-batch waits for its denominators,
    # metrics, largest difference and norm. A micro-batch waits because transformers reads whether the row is packed.
    micro_batches = {1000: 1, 1: SAMPLES}
    assert found == {(budget, count): 2 + 4 * count + max(count, micro_batches[budget]) for budget, count in found}


@pytest.mark.parametrize(
    ("options", "waits", "most"),
    [({}, 1, 46), ({"stop": ("never written",)}, 1, 46), ({"top_k": 4}, 2, 53)],
    ids=["plain", "stop", "top_k"],
)
def test_a_decoded_token_waits_once_and_with_top_k_twice(
    options: dict[str, Any], waits: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inside = causal_lm("llama", tmp_path), Waits()
    forward = model.forward

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with inside:
            return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    engine = EmbeddedEngine(model, tiny_tokenizer(), max_num_seqs=4)

    def generate(tokens: int) -> tuple[int, int]:
        """Return the waits, and the operations outside the model, for `tokens` tokens per row."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, **options)
        inside.operations = 0
        with counted() as found:
            engine.generate([Request(i, [5, 6, 7], params) for i in range(4)], seed=1, step=1)
        return found.waits, found.operations - inside.operations

    (few_waits, few), (many_waits, many) = generate(10), generate(20)
    assert many_waits - few_waits == 10 * waits
    assert many - few <= 10 * most
