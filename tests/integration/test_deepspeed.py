"""DeepSpeed makes FSDP2's updates and keeps the contract of a backend, at every ZeRO stage and precision. The tests
run on two real ranks, with --full-product also on one. test_portability.py resumes every engine on one rank, too."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.backends import build_backend
from rlhf.backends.base import TrainingBackend
from rlhf.backends.fsdp2 import Fsdp2Model
from rlhf.backends.training import Training
from rlhf.config import Config, RefConfig
from rlhf.learning.reference import Reference
from tests.support.checkpoints import begin_at, equal_bits, make_checkpointer, make_config, resume, run_ranks
from tests.support.engines import (
    CPU,
    ENGINES,
    NEEDS_DEEPSPEED,
    OPTIM,
    accumulate,
    allowed_float64_difference,
    engines_in_float64,
    gathered,
    logits_of,
    make_engine,
    state_of,
    tokens,
    train,
)
from tests.support.tiny_updates import tiny_qwen2
from tests.support.update_cases import ENTROPY_CASES, REJECTING_CASES, SHUFFLED_CASES, run_update

pytestmark = NEEDS_DEEPSPEED

STAGES = [f"zero{stage}" for stage in range(4)]
ZERO = [*STAGES, *(f"{stage}-bfloat16" for stage in STAGES)]
ALL = ["fsdp2", "fsdp2-bfloat16", *ZERO]
CASES = [
    "token-mean_k3_clipped_norm",
    "gspo_straight_through_rejected_tokens",
    "head_of_its_own_soft_capped",
    "critic_clipped_values",
]
# One stage tests each setting that other trainers have: SAPO, rejected responses and tokens, IcePop, the off-policy
# gradient of the KL, Clip-Cov, KL-Cov, a target entropy, and reshuffled mini-batches. pass@k and normalised rewards
# change advantages only, which no engine computes.
STAGE_OF_SETTINGS = "zero2"
SETTINGS_CASES = [case for case in REJECTING_CASES | ENTROPY_CASES | SHUFFLED_CASES if case not in CASES]
UPDATES_APART = allowed_float64_difference(steps=6, grad_clip=1.0)
"""Computed for `grad_clip=1`, and valid for the cases with a larger `grad_clip`, which clip nothing."""
EVERYTHING = ["model", "optimizer", "extra", "hf_model"]
SAVED = [["model"], ["hf_model", "extra"], ["hf_model", "optimizer"]]
LOADED = [["model"], ["model", "optimizer"], ["hf_model", "optimizer"], ["hf_model", "extra"]]
# A checkpoint has the same files in bfloat16 as in float32, so in bfloat16 each part is saved and loaded only once.
SAVED_BFLOAT16, LOADED_BFLOAT16 = SAVED[-1:], [["model", "optimizer"], ["hf_model", "extra"]]
DEADLINE_S = 500


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "found" in metafunc.fixturenames:
        ranks = [1, 2] if metafunc.config.getoption("full_product") else [2]
        metafunc.parametrize("found", ranks, indirect=True, scope="module", ids=lambda ranks: f"{ranks}_ranks")
    for name, parts in (("loaded", loaded), ("saved", saved)):
        if name in metafunc.fixturenames:
            whole = metafunc.config.getoption("full_product")
            cells = [(kind, "+".join(items)) for kind in ALL for items in parts(kind, whole)]
            metafunc.parametrize(("kind", name), cells)


def loaded(kind: str, whole: bool) -> list[list[str]]:
    """Return the items of each load of a checkpoint, in order."""
    return LOADED_BFLOAT16 if "bfloat16" in kind and not whole else LOADED


def saved(kind: str, whole: bool) -> list[list[str]]:
    """Return the items of each checkpoint that an engine saves."""
    return SAVED_BFLOAT16 if "bfloat16" in kind and not whole else SAVED


@pytest.fixture(scope="module")
def found(request, tmp_path_factory) -> dict[str, Any]:
    """The result of `work` on the ranks, which must be the same on all ranks."""
    folder, whole = tmp_path_factory.mktemp("deepspeed"), request.config.getoption("full_product")
    first, *others = run_ranks(request.param, work, str(folder), whole, deadline_s=DEADLINE_S, join=folder / "join")
    assert all(equal_bits(first, other) for other in others)
    return first


def work(rank: int, folder: str, whole: bool) -> dict[str, dict[str, Any]]:
    torch.use_deterministic_algorithms(True)  # as in a run on the CPU; it also fills fresh memory with NaN
    result = {kind: life_of_two_engines(kind, Path(folder, kind), whole) for kind in ALL}
    for kind in ["fsdp2", *STAGES]:
        settings = SETTINGS_CASES if kind in ("fsdp2", STAGE_OF_SETTINGS) else []
        with engines_in_float64():
            result[kind]["updates"] = {case: one_update(case, kind) for case in CASES + settings}
            result[kind]["reference"] = followed(kind)
        result[kind]["recomputed"] = recomputed(kind)
        result[kind]["decayed_otherwise"] = decayed_otherwise(kind, Path(folder, kind))
    return result


def one_update(case: str, kind: str) -> dict[str, Any]:
    update = run_update(case, 40, 0, backend=ENGINES[kind])
    return {key: update[key] for key in ("weights", "metrics")}


def life_of_two_engines(kind: str, folder: Path, whole: bool) -> dict[str, Any]:
    """One engine trains, saves and trains on. Another engine loads its save, is disturbed, resumes and trains on."""
    through, other = make_engine(kind, seed=1), make_engine(kind, seed=2)
    results: dict[str, Any] = {"spread": spread(through), "whole_tensors": whole_tensors(other)}
    throw_away(other)
    config = config_of(folder, kind)
    results["first_steps"] = train(through, 0)
    results["first"] = state_of(through)
    results["first_steps"] += train(through, 1)
    saver = make_checkpointer(config, through, 2)
    saver.save(2)
    results["saved"] = look_at(through)
    train(other, 7)  # so that its state differs from every checkpoint that it loads
    results["kernels"] = kernels_of_step(other, 8)
    saver.finish()
    results["loaded"] = {"+".join(items): load_only(items, other, config) for items in loaded(kind, whole)}

    results["saved_parts"] = {
        "+".join(items): save_only(items, through, other, config_of(folder / "+".join(items), kind))
        for items in saved(kind, whole)
    }

    config.trainer.resume_mode, config.checkpoint.load_contents = "auto", None
    assert resume(config, other) == 2
    results["resumed"] = look_at(other)
    results["skipped"] = [skipped_step(other, bad) for bad in (math.nan, math.inf)]
    throw_away(other)
    results["ends"] = []
    for backend in (through, other):
        figures = train(backend, 2)
        throw_away(other)
        results["ends"].append({"figures": figures + train(backend, 3), **look_at(backend)})
    return results


@pytest.mark.parametrize("kind", ALL)
def test_a_resumed_run_has_the_same_bits(found, kind):
    """The bits are the same even if steps were skipped and gradients discarded after the resume."""
    run = found[kind]
    assert equal_bits(run["resumed"], run["saved"])
    assert not equal_bits(run["ends"][0]["logits"], run["saved"]["logits"])
    assert equal_bits(run["ends"][0], run["ends"][1])


def kernels_of_step(backend: TrainingBackend, step: int) -> list[str]:
    """Return the names of the torch operators that an optimizer step calls, including clipping."""
    accumulate(backend, step)
    with CalledOperators() as called:
        backend.optimizer_step()
    return sorted(called.names)


class CalledOperators(TorchDispatchMode):
    """Collects the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ALL)
def test_adamw_steps_in_one_fused_call(found, kind):
    kernels = found[kind]["kernels"]
    assert "_fused_adamw_" in kernels
    assert not {"addcdiv_", "_foreach_addcdiv_", "lerp_", "_foreach_lerp_"} & set(kernels)


def throw_away(backend: TrainingBackend) -> None:
    """Discard gradients of several micro-batches, which must not reach the next step."""
    accumulate(backend, 5, scale=3.0)
    backend.zero_grad()
    accumulate(backend, 7, scale=math.nan)
    backend.zero_grad()


def skipped_step(backend: TrainingBackend, bad: float) -> dict[str, Any]:
    """Take a step with a gradient that is not finite on one rank."""
    accumulate(backend, 4, scale=bad if dist.get_rank() == dist.get_world_size() - 1 else 1.0)
    figures = backend.optimizer_step()
    # Return whether the norm is finite, because a NaN would not equal another rank's NaN.
    return {"finite": math.isfinite(figures["grad_norm"]), "lr": figures["lr"], **look_at(backend)}


@pytest.mark.parametrize("kind", ALL)
def test_a_gradient_norm_that_is_not_finite_skips_the_step(found, kind):
    skipped = {"finite": False, "lr": found[kind]["ends"][0]["figures"][0]["lr"]}
    for step in found[kind]["skipped"]:
        assert equal_bits(step, skipped | found[kind]["resumed"])


def load_only(items: list[str], backend: TrainingBackend, config: Config) -> dict[str, Any]:
    """Return the state of the engine before and after it loads only `items` of a checkpoint."""
    train(backend, 9)
    before = look_at(backend)
    begin_at(config, config.run_dir / "global_step_2", list(items))
    resume(config, backend)
    return {"before": before, "after": look_at(backend)}


def test_only_what_load_contents_names_is_loaded(found, kind, loaded):
    source, before, after = found[kind]["saved"], *found[kind]["loaded"][loaded].values()
    assert not any(equal_bits(before[key], source[key]) for key in source)
    for key in ("model", "logits"):
        assert equal_bits(after[key], source[key])
    for key in ("optimizer", "extra"):
        assert equal_bits(after[key], (source if key in loaded else before)[key])


def save_only(items: list[str], source: TrainingBackend, target: TrainingBackend, config: Config) -> dict[str, Any]:
    """Save `items` only. Return the parts of the checkpoint, and the weights of another engine that loads it."""
    config.checkpoint.contents = list(items)
    saver = make_checkpointer(config, source, 2)
    saver.save(2)
    train(target, 9)
    saver.finish()
    assert resume(config, target) == 2
    parts = sorted(part.name for part in (config.run_dir / "global_step_2" / "actor").iterdir())
    return {"parts": parts, "model": look_at(target)["model"]}


def test_only_what_contents_names_is_saved(found, kind, saved):
    run = found[kind]["saved_parts"][saved]
    assert run["parts"] == sorted(saved.replace("hf_model", "huggingface").split("+"))
    assert equal_bits(run["model"], found[kind]["saved"]["model"])


@pytest.mark.parametrize(
    ("stage", "case"),
    [*itertools.product(STAGES, CASES), *((STAGE_OF_SETTINGS, case) for case in SETTINGS_CASES)],
)
def test_an_update_equals_fsdp2s(found, stage, case):
    mine, theirs = found[stage]["updates"][case], found["fsdp2"]["updates"][case]
    for key in ("weights", "metrics"):
        torch.testing.assert_close(mine[key], theirs[key], rtol=UPDATES_APART, atol=UPDATES_APART)


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_computes_as_fsdp2s_does(found, stage):
    """At stage 0 a rank sums its gradients in bfloat16, at the other stages in float32.

    Later steps differ by rounding: ZeRO 3 replaces torch's linear function, for the whole process. Its function adds
    the bias to the rounded product. In the first step all biases are 0.
    """
    mine, theirs, exact = (found[kind] for kind in (f"{stage}-bfloat16", "fsdp2-bfloat16", stage))
    tolerance = 5e-3 if stage == "zero0" else 1e-6
    for item in ("model", "optimizer"):
        torch.testing.assert_close(mine["first"][item], theirs["first"][item], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine["first_steps"][0], theirs["first_steps"][0], rtol=tolerance, atol=tolerance)
    assert mine["first_steps"][0]["grad_norm"] != pytest.approx(exact["first_steps"][0]["grad_norm"], rel=1e-5)


def whole_tensors(backend: TrainingBackend) -> dict[str, Any]:
    """Return the whole tensors. Each has a negative zero, which a sum over ranks would lose."""
    for shard in backend.model_shards().values():
        if shard.offsets[0] == 0:
            shard.local.view(-1)[:1] = -0.0
    backend.after_load()
    return {
        "full": {name: tensor.clone() for name, tensor in backend.full_tensors()},
        "cast": {name: tensor.clone() for name, tensor in backend.full_tensors(torch.bfloat16)},
        "shards": gathered(backend.model_shards()),
    }


@pytest.mark.parametrize("kind", ALL)
def test_full_tensors_are_the_float32_weights_bit_for_bit(found, kind):
    run = found[kind]["whole_tensors"]
    assert equal_bits(run["full"], run["shards"])
    assert equal_bits(run["full"], found["fsdp2"]["whole_tensors"]["full"])
    assert list(run["full"]) == list(found["fsdp2"]["whole_tensors"]["full"])
    assert all(tensor.dtype == torch.float32 for tensor in run["full"].values())
    assert all(torch.signbit(tensor.view(-1)[0]) for tensor in run["full"].values())


@pytest.mark.parametrize("kind", ALL)
def test_full_tensors_in_bfloat16_are_the_cast_float32_weights(found, kind):
    """Below ZeRO 3 in bfloat16, these are the module's own tensors, so no rank gathers them."""
    run = found[kind]["whole_tensors"]
    assert equal_bits(run["cast"], {name: tensor.to(torch.bfloat16) for name, tensor in run["full"].items()})


def followed(kind: str) -> dict[str, Tensor]:
    """Return a reference policy with other weights after one update towards an actor that has trained two steps."""
    backend = make_engine(kind, seed=1)
    train(backend, 0, 1)
    frozen = Fsdp2Model(tiny_qwen2(3).requires_grad_(False), ENGINES[kind], CPU)
    average = Reference(frozen, 1.0, 64, RefConfig(update_freq=1, alpha=0.3))
    average.maybe_update(backend, 1)
    return gathered(average.shards())


@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_follows_the_actor(found, stage):
    apart = allowed_float64_difference(steps=2, grad_clip=0.5)
    torch.testing.assert_close(found[stage]["reference"], found["fsdp2"]["reference"], rtol=0, atol=apart)


def recomputed(kind: str) -> list[dict[str, float]]:
    """Return the metrics of the first two steps of `life_of_two_engines`, with gradient checkpointing."""
    model = tiny_qwen2(1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = build_backend(model, ENGINES[kind], CPU, Training(OPTIM, grad_clip=0.5, total_optimizer_steps=20))
    return train(backend, 0, 1)


def decayed_otherwise(kind: str, folder: Path) -> dict[str, Any]:
    """Load the checkpoint of an engine that does not decay norms and biases into an engine that does. Return the state,
    and the parameter groups of both engines."""
    optim = replace(OPTIM, decay_norm_and_bias=True)
    options: dict[str, Any] = {"grad_clip": 0.5, "total_optimizer_steps": 20}
    backend: Any = build_backend(tiny_qwen2(3), ENGINES[kind], CPU, Training(optim, **options))
    config = config_of(folder, kind)
    begin_at(config, config.run_dir / "global_step_2", EVERYTHING)
    resume(config, backend)
    grouped: Any = make_engine(kind)
    groups = [[group["weight_decay"] for group in each.optimizer.param_groups] for each in (backend, grouped)]
    return {"groups": groups, **look_at(backend)}


@pytest.mark.parametrize("kind", ["fsdp2", *STAGES])
def test_parameter_groups_do_not_affect_checkpoints(found, kind):
    run = found[kind]["decayed_otherwise"]
    assert run.pop("groups") == [[0.1], [0.1, 0.0]]
    assert equal_bits(run, found[kind]["saved"])


@pytest.mark.parametrize("kind", ["fsdp2", *STAGES])
def test_gradient_checkpointing_changes_nothing(found, kind):
    assert found[kind]["recomputed"] == found[kind]["first_steps"]


def spread(backend: TrainingBackend) -> list[int]:
    """Return how many weight elements each rank saves."""
    counts: list[int] = [0] * dist.get_world_size()
    shards = backend.model_shards().values()
    dist.all_gather_object(counts, sum(shard.local.numel() for shard in shards if shard.saved_here))
    return counts


@pytest.mark.parametrize("kind", ZERO)
def test_the_ranks_divide_the_saved_bytes(found, kind):
    counts = found[kind]["spread"]
    assert sum(counts) == sum(found["fsdp2"]["spread"])
    assert counts[0] == sum(counts) if kind.startswith("zero0") else max(counts) < 1.1 * sum(counts) / len(counts)


def config_of(folder: Path, kind: str) -> Config:
    config = make_config(folder)
    config.backend = ENGINES[kind]
    config.checkpoint.contents = list(EVERYTHING)
    return config


@torch.no_grad()
def look_at(backend: TrainingBackend) -> dict[str, Any]:
    """Return the state, and the logits that the module computes from its own copy of the weights."""
    return state_of(backend) | {"logits": logits_of(backend, tokens(10)).clone()}
