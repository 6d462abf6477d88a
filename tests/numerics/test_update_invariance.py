"""One update on real ranks: the same gradients, weights and metrics at every micro-batch size, padding and number of ranks, and those of
a plain loop over sequences."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf import events
from rlhf.backends.fsdp2 import Fsdp2Backend, Fsdp2Policy
from rlhf.backends.update import compute_log_probs, needs_old_log_probs, update_policy
from rlhf.batch import Batch
from rlhf.config import ActorConfig, BackendConfig, OptimConfig
from rlhf.distributed import all_max, all_sum
from tests.numerics.plain_update import plain_update
from tests.numerics.ranks import run_ranks
from tests.numerics.tiny import random_batch, tiny_qwen2

GROUP, PROMPTS, TOTAL_STEPS = 2, 12, 10
CPU = torch.device("cpu")
# An epsilon far above rounding noise: with a tiny one AdamW makes steps of full size out of gradients that are only noise.
OPTIM = OptimConfig(
    lr=0.02, eps=1e-2, betas=[0.9, 0.99], weight_decay=0.1, lr_scheduler_type="cosine", lr_warmup_steps=2
)
# name -> mini-batches and settings
CASES: dict[str, tuple[int, ActorConfig]] = {
    "token-mean_k3_clipped_norm": (
        2,
        ActorConfig(
            ppo_epochs=2, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3", grad_clip=0.2, clip_ratio_high=0.28
        ),
    ),
    "seq-mean-token-mean_k2_entropy": (
        3,
        ActorConfig(
            loss_agg_mode="seq-mean-token-mean",
            use_kl_loss=True,
            kl_loss_coef=0.2,
            kl_loss_type="k2",
            entropy_coeff=0.1,
            clip_ratio_low=0.05,
            clip_ratio_high=0.05,
            grad_clip=100.0,
        ),
    ),
    "seq-mean-token-sum_k1": (
        1,
        ActorConfig(
            ppo_epochs=3, loss_agg_mode="seq-mean-token-sum", use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1"
        ),
    ),
    "one_look_at_each_sample": (1, ActorConfig()),
}
# world size -> (micro-batch size, columns of extra padding)
SPLITS = {1: [(PROMPTS * GROUP, 0), (5, 0), (1, 6)], 2: [(PROMPTS * GROUP, 0), (3, 6)]}


def whole_batch() -> Batch:
    return random_batch(seed=11, samples=PROMPTS * GROUP)


def start_policies() -> tuple[Any, Any]:
    """The policy and a reference that is near it, so that no bound of the KL estimate is reached."""
    policy, reference = tiny_qwen2(), tiny_qwen2()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return policy, reference


def share(batch: Batch, mini_batches: int) -> Batch:
    """This rank's rows: of every mini-batch an equal part, as `PromptShare` deals them."""
    rows = [part.chunk(dist.get_world_size())[dist.get_rank()] for part in torch.arange(len(batch)).chunk(mini_batches)]
    return batch.select(torch.cat(rows))


def padded(batch: Batch, columns: int) -> Batch:
    """Wider tensors, with something in the padding that must not be read."""

    def pad(tensor: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, columns), value=value)

    return replace(batch, input_ids=pad(batch.input_ids, 9), rollout_log_probs=pad(batch.rollout_log_probs, -5.0))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_update(config: ActorConfig, mini_batches: int, extra_columns: int) -> dict[str, Any]:
    """Weights, gradients of every optimizer step, and metrics of one update on this process group."""
    policy, frozen = start_policies()
    backend = Fsdp2Backend(
        policy,
        BackendConfig(),
        config.optim,
        CPU,
        1.0,
        grad_clip=config.grad_clip,
        total_optimizer_steps=TOTAL_STEPS,
        hf_files={},
    )
    batch = padded(share(whole_batch(), mini_batches), extra_columns)
    if config.use_kl_loss:
        reference = Fsdp2Policy(frozen.requires_grad_(False), BackendConfig(), CPU, 1.0)
        batch.ref_log_probs = compute_log_probs(reference, batch, config.ppo_micro_batch_size_per_gpu)
    if needs_old_log_probs(config, PROMPTS):
        batch.old_log_probs = compute_log_probs(backend, batch, config.ppo_micro_batch_size_per_gpu)
    gradients: list[dict[str, Tensor]] = []

    def keep_gradients(event: str) -> None:
        if event == "update.mid":
            gradients.append({name: whole(p.grad) for name, p in backend.model.named_parameters()})

    events._listeners[:] = [keep_gradients]
    metrics = update_policy(backend, batch, config, mini_batches, all_sum, all_max)
    weights = {name: tensor.clone() for name, tensor in backend.full_tensors()}
    return {"weights": weights, "gradients": gradients, "metrics": metrics}


def every_update() -> dict[str, dict[str, Any]]:
    results = {}
    for case, (mini_batches, config) in CASES.items():
        for micro, columns in SPLITS[dist.get_world_size()]:
            settings = replace(
                config,
                optim=OPTIM,
                ppo_micro_batch_size_per_gpu=micro,
                ppo_mini_batch_size=PROMPTS // mini_batches,
            )
            results[f"{case}/{micro}/{columns}"] = run_update(settings, mini_batches, columns)
    return results


@pytest.fixture(scope="module")
def updates() -> dict[tuple[int, str], dict[str, Any]]:
    """Results by (world size, "case/micro-batch size/extra columns"); every rank must have the same."""
    found = {}
    for world_size in SPLITS:
        ranks = run_ranks(world_size, every_update)
        for key, result in ranks[0].items():
            for other in ranks[1:]:
                assert_same(other[key], result, tolerance=0)
            found[world_size, key] = result
    return found


def assert_same(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    options = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(result["weights"], expected["weights"], **options)
    torch.testing.assert_close(result["metrics"], expected["metrics"], **options)
    assert len(result["gradients"]) == len(expected["gradients"])
    # The first gradient, as a share of its norm; the later ones are taken at weights that already differ by rounding.
    first, other = result["gradients"][0], expected["gradients"][0]
    norm = torch.stack([g.double().square().sum() for g in other.values()]).sum().sqrt()
    for name, gradient in other.items():
        torch.testing.assert_close(first[name] / norm, gradient / norm, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("world_size", "split"), [(world, f"{m}/{c}") for world, splits in SPLITS.items() for m, c in splits]
)
def test_equals_the_plain_loop(updates, plain, world_size, split, case):
    assert_same(updates[world_size, f"{case}/{split}"], plain[case], tolerance=1e-6)


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    """The plain loop's results; each case must be one in which what it is about happens."""
    found = {}
    for case, (mini_batches, config) in CASES.items():
        policy, reference = start_policies()
        settings = replace(config, optim=OPTIM)
        weights, gradients, metrics = plain_update(
            policy, reference, whole_batch(), settings, mini_batches, TOTAL_STEPS
        )
        moved = max(float((weights[name] - p.detach()).abs().max()) for name, p in policy.named_parameters())
        assert moved > 0.005 * len(gradients)
        found[case] = {"weights": weights, "gradients": gradients, "metrics": metrics}
    norms = {case: result["metrics"]["actor/grad_norm"] for case, result in found.items()}
    assert norms["token-mean_k3_clipped_norm"] > 0.4
    assert norms["seq-mean-token-mean_k2_entropy"] < 100
    assert found["seq-mean-token-mean_k2_entropy"]["metrics"]["actor/clip_frac"] > 0.05
    return found
