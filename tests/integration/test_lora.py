"""Adapters in every engine on two real ranks: the same model as with peft alone, an unchanged base, one save format.

Tests some engines by default, or all of them with --full-product.
"""

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.backends.base import TrainingBackend
from rlhf.config import Config, LoraConfig, RolloutConfig
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.models.adapter_layers import without_adapters
from rlhf.rollout.embedded import build_embedded_engine
from rlhf.rollout.weight_digest import WeightsMismatch
from tests.support.adapted_engines import DORA, LORA, adapted_engine, with_plain_peft
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, resume, run_ranks
from tests.support.engines import (
    ENGINES,
    NEEDS_DEEPSPEED,
    allowed_float64_difference,
    engines_in_float64,
    gathered,
    logits_of,
    loss_of,
    mean_loss_bound,
    rounded_biases_bound,
    state_of,
    tokens,
    train,
)
from tests.support.rounding import sum_bound
from tests.support.tiny_updates import tiny_qwen2

pytestmark = NEEDS_DEEPSPEED

FLOAT32, BFLOAT16 = ["fsdp2", "zero2", "zero3"], ["fsdp2-bfloat16", "zero2-bfloat16"]
MORE_FLOAT32, MORE_BFLOAT16 = ["zero0", "zero1"], ["zero0-bfloat16", "zero1-bfloat16", "zero3-bfloat16"]
STEPS = 3
DEADLINE_S = 500


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize arguments by name: `plain` is an engine in float32, `half` in bfloat16, and `kind` is either.
    `writer` and `reader` are engines of the same type."""
    float32, bfloat16 = kinds(metafunc.config)
    pairs = [*itertools.product(float32, repeat=2), *itertools.product(bfloat16, repeat=2)]
    for name, values in (("plain", float32), ("half", bfloat16), ("kind", float32 + bfloat16)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)
    if "writer" in metafunc.fixturenames:
        metafunc.parametrize(("writer", "reader"), pairs)


def kinds(config: pytest.Config) -> tuple[list[str], list[str]]:
    whole = config.getoption("full_product")
    return FLOAT32 + (MORE_FLOAT32 if whole else []), BFLOAT16 + (MORE_BFLOAT16 if whole else [])


@pytest.fixture(scope="module")
def found(tmp_path_factory, request) -> dict[str, Any]:
    """The result of `work` on two ranks, which must be the same on both."""
    folder = tmp_path_factory.mktemp("lora")
    first, other = run_ranks(2, work, str(folder), *kinds(request.config), deadline_s=DEADLINE_S, join=folder / "join")
    assert equal_bits(first, other)
    return first


def work(rank: int, folder: str, float32: list[str], bfloat16: list[str]) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    results = {kind: one_run(kind, Path(folder, kind)) for kind in float32 + bfloat16}
    for kind in float32 + bfloat16:
        reader = adapted_engine(kind, seed=9)
        results[kind]["opened"] = {}
        for writer in float32 if kind in float32 else bfloat16:
            config = config_of(Path(folder, writer), kind)
            assert resume(config, reader) == STEPS
            results[kind]["opened"][writer] = {"state": state_of(reader), "loss": loss_of(reader, STEPS)}
    results["dora"] = {kind: look_at(trained(kind, DORA), DORA) for kind in ("fsdp2", "zero2")}
    results["recomputed"] = {kind: weights_of(trained(kind, recompute=True)) for kind in ("fsdp2", "zero3")}
    with engines_in_float64():
        results["in_float64"] = {kind: weights_of(trained(kind)) for kind in float32}
    results["dropped"] = dropped()
    results["kept_silently"] = {kind: kept_silently(kind) for kind in ("fsdp2", "zero3")}
    return results


def one_run(kind: str, folder: Path) -> dict[str, Any]:
    """Train and save an engine with adapters. Return what the tests compare."""
    backend = adapted_engine(kind)
    results: dict[str, Any] = {"new": look_at(backend), "base": gathered(backend.base_shards())}
    train(backend, *range(STEPS))
    results |= {"trained": look_at(backend), "base_after": gathered(backend.base_shards()), "state": state_of(backend)}
    merged = torch.tensor(sum(shard.local.nbytes for shard in backend.merged_shards().values()))
    dist.all_reduce(merged, dist.ReduceOp.MAX)
    results["merged_bytes"] = backend.merged_bytes(), int(merged)
    checkpointer = make_checkpointer(config_of(folder, kind), backend, STEPS)
    checkpointer.save(STEPS)
    checkpointer.finish()
    results["loss"] = loss_of(backend, STEPS)
    return results


def config_of(folder: Path, kind: str) -> Config:
    config = make_config(folder)
    config.backend = ENGINES[kind]
    return config


def trained(kind: str, lora: LoraConfig = LORA, *, recompute: bool = False) -> TrainingBackend:
    backend = adapted_engine(kind, lora=lora, recompute=recompute)
    train(backend, *range(STEPS))
    return backend


def weights_of(backend: TrainingBackend) -> dict[str, Tensor]:
    return gathered(backend.model_shards())


@torch.no_grad()
def look_at(backend: TrainingBackend, lora: LoraConfig = LORA) -> dict[str, Any]:
    """Return the engine's logits, with and without adapters, and its merged weights; and the same from plain peft
    with equal adapters."""
    weights, ids = weights_of(backend), tokens(7)
    alone = with_plain_peft(weights, lora)
    results = {"weights": weights, "logits": logits_of(backend, ids), "peft": alone(input_ids=ids).logits}
    with without_adapters(backend.module):
        results["disabled"] = logits_of(backend, ids)
    results["enabled_again"] = logits_of(backend, ids)
    results["sent"] = {name: tensor.clone() for name, tensor in backend.full_tensors()}
    results["sent_half"] = {name: tensor.clone() for name, tensor in backend.full_tensors(torch.bfloat16)}
    results["peft_merged"] = dict(alone.merge_and_unload().named_parameters())
    results["still"] = logits_of(backend, ids)
    return results


def dropped() -> list[Tensor]:
    """Train twice with dropout from the same seed. Return both times the weights and two passes of logits."""
    outputs = []
    for _ in range(2):
        backend = adapted_engine("fsdp2", lora=LoraConfig(enabled=True, rank=4, dropout=0.5))
        torch.manual_seed(5)
        train(backend, 0, 1)
        outputs.append(torch.cat([tensor.flatten() for tensor in weights_of(backend).values()]))
        with torch.no_grad():
            outputs += [logits_of(backend, tokens(7)) for _ in range(2)]
    return outputs


def kept_silently(kind: str) -> str:
    """Return the error of a weight sync to an engine that keeps its old weights."""
    backend = adapted_engine(kind)
    engine = build_embedded_engine(tiny_qwen2(0), SimpleNamespace(eos_token_id=1), RolloutConfig(dtype="float32"))
    sampler = PolicySampler(engine, backend, seed=0)
    sampler.generate([], version=0, step=1)
    train(backend, 0)
    # The weights arrive in copies, not in the tensors that the engine samples with.
    copies = copy.deepcopy(engine.model).state_dict(keep_vars=True)
    engine.model.state_dict = lambda keep_vars: copies
    with pytest.raises(WeightsMismatch) as error:
        sampler.generate([], version=1, step=2)
    del engine.model.state_dict
    sampler.generate([], version=1, step=2)
    return str(error.value)


@pytest.mark.parametrize("when", ["new", "trained"])
def test_forward_is_that_of_peft_alone_to_the_bit(found, plain, when):
    seen = found[plain][when]
    assert torch.equal(seen["logits"], seen["peft"])
    assert torch.equal(seen["enabled_again"], seen["logits"])
    assert torch.equal(seen["still"], seen["logits"])


@torch.no_grad()
def test_logits_with_disabled_adapters_equal_the_base_to_the_bit(found, plain):
    seen = found[plain]["trained"]
    assert torch.equal(seen["disabled"], tiny_qwen2(0)(input_ids=tokens(7)).logits)
    assert (seen["logits"] - seen["disabled"]).abs().max() > 1e-2
    assert torch.equal(found[plain]["new"]["logits"], seen["disabled"])  # the adapters' factor B starts at zero


def test_base_is_untouched(found, kind):
    dtype = torch.bfloat16 if "bfloat16" in kind else torch.float32
    base = {name: tensor.to(dtype) for name, tensor in tiny_qwen2(0).named_parameters()}
    assert equal_bits(found[kind]["base"], base)
    assert equal_bits(found[kind]["base_after"], base)


def test_merged_weights_are_those_of_peft_to_the_bit(found, plain):
    seen = found[plain]["trained"]
    assert equal_bits(seen["sent"], seen["peft_merged"])
    assert equal_bits(seen["sent_half"], {name: tensor.bfloat16() for name, tensor in seen["sent"].items()})


def test_a_base_in_bfloat16_is_merged_in_float32(found, half):
    """Rounding the sum to bfloat16 first would lose most of a small adapter."""
    seen, base = found[half]["trained"], found[half]["base"]
    name = "model.layers.0.self_attn.q_proj"
    a, b = (seen["weights"][f"{name}.lora_{factor}.weight"] for factor in "AB")
    expected = base[f"{name}.weight"].float() + (b @ a) * (LORA.alpha / LORA.rank)
    assert torch.equal(seen["sent"][f"{name}.weight"], expected)
    assert seen["weights"][f"{name}.lora_A.weight"].dtype == torch.float32
    # The engine computes in bfloat16, peft in float32.
    assert 0 < (seen["logits"].float() - seen["peft"]).abs().max() < 0.3


def test_estimated_memory_of_a_merge_equals_the_measured_memory(found, kind):
    estimated, measured = found[kind]["merged_bytes"]
    assert estimated == measured > 0


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_an_engine_that_keeps_old_adapter_weights_is_detected(found, engine):
    names = found["fsdp2"]["new"]["weights"]
    adapted = sum(name.endswith("lora_A.weight") for name in names)
    # The base did not change, so the engine has it.
    expected = f"(step 1). Changed in training, but the engine still has the old values: {adapted} ("
    assert expected in found["kept_silently"][engine]
    assert "Neither" not in found["kept_silently"][engine]


def test_engines_agree(found, plain):
    weights = found["in_float64"]
    apart = allowed_float64_difference(STEPS, grad_clip=0.5)
    torch.testing.assert_close(weights[plain], weights["fsdp2"], rtol=0, atol=apart)


def test_checkpoint_holds_adapters_and_moments_alone(found, kind):
    state = found[kind]["state"]
    assert len(state["model"]) == 2 * 7 * 2  # two factors of seven layers of each of two blocks
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in state["model"])
    assert all(tensor.dtype == torch.float32 for tensor in state["model"].values())
    names = state["model"].keys()
    assert state["optimizer"].keys() == {f"{n}.{k}" for n in names for k in ("step", "exp_avg", "exp_avg_sq")}
    assert all(state["optimizer"][f"{name}.exp_avg"].abs().max() > 0 for name in names)


def test_every_engine_loads_adapters_saved_by_every_engine(found, writer, reader):
    # Promise 15.
    opened, saved = found[reader]["opened"][writer], found[writer]
    assert equal_bits(opened["state"], saved["state"])
    apart = rounded_biases_bound(saved["loss"]) if "bfloat16" in reader else mean_loss_bound(saved["loss"])
    torch.testing.assert_close(opened["loss"], saved["loss"], rtol=0, atol=apart)
    if writer == reader:
        assert torch.equal(opened["loss"], saved["loss"])


@pytest.mark.parametrize("engine", ["fsdp2", "zero2"])
def test_dora_is_that_of_peft(found, engine):
    seen = found["dora"][engine]
    assert torch.equal(seen["logits"], seen["peft"])
    assert torch.equal(seen["disabled"], found["fsdp2"]["trained"]["disabled"])
    assert seen["sent"].keys() == seen["peft_merged"].keys()
    for name, weight in seen["peft_merged"].items():
        # Terms: 24 for the norm of a row of at most 24 weights, 4 for each weight's sum in B A (rank 4), and 2 for a
        # quotient and a product.
        apart = min(1e-6, sum_bound(24 + 4 + 2) * float(weight.abs().max()))
        torch.testing.assert_close(seen["sent"][name], weight, rtol=0, atol=apart)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_recomputed_activations_give_the_same_gradients(found, engine):
    assert equal_bits(found["recomputed"][engine], found[engine]["state"]["model"])


def test_dropout_is_of_the_update_alone_and_follows_the_generator(found):
    first, passes, second = found["dropped"][0], found["dropped"][1:3], found["dropped"][3]
    assert torch.equal(first, second)
    assert torch.equal(*passes)
    weights = found["fsdp2"]["state"]["model"]
    assert not torch.equal(first, torch.cat([tensor.flatten() for tensor in weights.values()]))
