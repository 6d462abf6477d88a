"""Runs one update of an actor or a critic on this process group, for cases of settings and batches."""

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf import events
from rlhf.backends import build_backend
from rlhf.backends.base import TrainingBackend
from rlhf.backends.fsdp2 import Fsdp2Model
from rlhf.backends.training import Training
from rlhf.config import (
    ActorConfig,
    AlgorithmConfig,
    BackendConfig,
    Config,
    CriticConfig,
    EntropyCtrlConfig,
    GuardsConfig,
    OptimConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
)
from rlhf.config.derived import needs_old_log_probs
from rlhf.learning.actor import Actor
from rlhf.learning.balancing import SampleBalance, balance_samples
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from rlhf.learning.policy import Policy
from rlhf.learning.resharding import SampleResharder, Shuffle
from rlhf.models.log_prob_head import LogProbModel
from rlhf.models.log_prob_probe import check_log_probs
from rlhf.models.packing import pack
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from tests.support.plain_update import SEED, STEP, log_softmax_of, on_grid
from tests.support.tiny_updates import (
    EveryBatch,
    random_batch,
    tiny_gemma2,
    tiny_qwen2,
    tiny_value_model,
    with_observations,
)

GROUP, PROMPTS, TOTAL_STEPS = 2, 12, 10
CPU = torch.device("cpu")
# Epsilon is far above rounding noise: with a tiny epsilon AdamW takes full steps along gradients that are only noise.
OPTIM = OptimConfig(
    lr=0.02, eps=1e-2, betas=[0.9, 0.99], weight_decay=0.1, lr_scheduler_type="cosine", lr_warmup_steps=2
)


def actor_case(
    correction: str | None = None,
    loss_mode: str | PolicyLossConfig = "vanilla",
    rejection: dict[str, Any] | None = None,
    **settings: Any,
) -> Config:
    corrected = RolloutCorrectionConfig(correction, rollout_is_threshold=1.5, **rejection or {})
    return Config(
        actor=ActorConfig(
            policy_loss=PolicyLossConfig(loss_mode) if isinstance(loss_mode, str) else loss_mode, **settings
        ),
        algorithm=AlgorithmConfig(rollout_correction=corrected),
    )


# name -> mini-batches and settings
ACTOR_CASES: dict[str, tuple[int, Config]] = {
    "token-mean_k3_clipped_norm": (
        2,
        actor_case(
            ppo_epochs=2, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3", grad_clip=0.2, clip_ratio_high=0.28
        ),
    ),
    "seq-mean-token-mean_k2_entropy": (
        3,
        actor_case(
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
    "seq-mean-token-sum_k1_token_correction": (
        1,
        actor_case(
            "token",
            ppo_epochs=3,
            loss_agg_mode="seq-mean-token-sum",
            use_kl_loss=True,
            kl_loss_coef=0.1,
            kl_loss_type="k1",
        ),
    ),
    "one_look_at_each_sample": (1, actor_case()),
    "dual_clip": (3, actor_case(ppo_epochs=2, clip_ratio_c=1.05)),
    "cispo_sequence_correction_norm": (
        2,
        actor_case(
            "sequence",
            loss_mode="cispo",
            ppo_epochs=2,
            loss_agg_mode="seq-mean-token-sum-norm",
            loss_scale_factor=20,
            use_kl_loss=True,
            kl_loss_coef=0.3,
            kl_loss_type="abs",
        ),
    ),
}
REJECTING_CASES: dict[str, tuple[int, Config]] = {
    "gspo_straight_through_rejected_tokens": (
        2,
        actor_case(
            loss_mode="gspo",
            rejection={"rollout_rs": "token_k2", "rollout_rs_threshold": 0.1},
            ppo_epochs=2,
            loss_agg_mode="seq-mean-token-mean",
            clip_ratio_low=0.01,
            clip_ratio_high=0.01,
            use_kl_loss=True,
            kl_loss_coef=0.3,
            kl_loss_type="k3+",
        ),
    ),
    "sapo_rejected_responses": (
        2,
        actor_case(
            "token",
            loss_mode="sapo",
            rejection={"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.2},
            ppo_epochs=2,
            loss_agg_mode="seq-mean-token-mean",
            tau_neg=3.0,
            use_kl_loss=True,
            kl_loss_coef=0.3,
            use_bias_correction_kl=True,
            grad_clip=0.2,
        ),
    ),
    "clip_cov_icepop_rejected_tokens": (
        1,
        actor_case(
            "token",
            PolicyLossConfig("clip_cov", clip_cov_ratio=0.1, clip_cov_lb=0.3, clip_cov_ub=1.5),
            rejection={
                "rollout_is_threshold_lower": 0.7,
                "rollout_rs": "token_k3",
                "rollout_rs_threshold": 0.3,
            },
            ppo_epochs=2,
            clip_ratio_low=0.05,
            clip_ratio_high=0.05,
            entropy_coeff=0.1,
        ),
    ),
}
ENTROPY_CASES: dict[str, tuple[int, Config]] = {
    "kl_cov_entropy_at_a_target": (
        3,
        actor_case(
            loss_mode=PolicyLossConfig("kl_cov", kl_cov_ratio=0.2, ppo_kl_coef=0.5),
            ppo_epochs=2,
            entropy_coeff=0.1,
            entropy_ctrl=EntropyCtrlConfig("adaptive", 2.98, 0.2, 0.02, 0.4),
        ),
    ),
}
# Here `rollout_correction` is off, so only tokens of an older policy are weighted.
OLDER_CASES: dict[str, tuple[int, Config]] = {
    "older_samples": (2, actor_case(ppo_epochs=2, clip_ratio_high=0.28)),
    "older_samples_one_look": (1, actor_case(loss_agg_mode="seq-mean-token-mean")),
}
SHUFFLED_CASES: dict[str, tuple[int, Config]] = {
    "shuffled_mini_batches": (3, actor_case(ppo_epochs=2, shuffle=True, use_kl_loss=True, kl_loss_coef=0.3)),
}
# Only these cases have a head that is not tied to the embedding.
OWN_HEAD_CASES: dict[str, tuple[int, Config]] = {
    "head_of_its_own_soft_capped": (2, actor_case(use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.1)),
}
ACTOR_CASES |= SHUFFLED_CASES | REJECTING_CASES | ENTROPY_CASES | OLDER_CASES | OWN_HEAD_CASES
CRITIC_CASES: dict[str, tuple[int, Config]] = {
    "critic_clipped_values": (
        2,
        Config(critic=CriticConfig(ppo_epochs=2, cliprange_value=0.02, grad_clip=100.0)),
    ),
    "critic_shuffled_mini_batches": (3, Config(actor=ActorConfig(shuffle=True), critic=CriticConfig(ppo_epochs=2))),
    "critic_seq-mean-token-mean": (3, Config(critic=CriticConfig(loss_agg_mode="seq-mean-token-mean", grad_clip=0.1))),
}
CASES = ACTOR_CASES | CRITIC_CASES
OBSERVING_CASES = {
    "seq-mean-token-mean_k2_entropy",
    "gspo_straight_through_rejected_tokens",
    "cispo_sequence_correction_norm",
    "older_samples_one_look",
    "clip_cov_icepop_rejected_tokens",
    "critic_seq-mean-token-mean",
}
# Only these cases decay norms and biases.
ALL_DECAYED_CASES = {"token-mean_k3_clipped_norm", "critic_seq-mean-token-mean"}
# Only these cases change the learning rate once per training step; all others change it per optimizer step.
BY_TRAINING_STEPS_CASES = {"cispo_sequence_correction_norm", "critic_clipped_values"}


def with_optim(case: str, config: Config, **settings: Any) -> Config:
    """Return `config` with the case's optimizer and `settings` in both roles."""
    interval = "training_step" if case in BY_TRAINING_STEPS_CASES else "optimizer_step"
    decays = case in ALL_DECAYED_CASES
    settings["optim"] = replace(OPTIM, decay_norm_and_bias=decays, lr_scheduler_interval=interval)
    return replace(config, actor=replace(config.actor, **settings), critic=replace(config.critic, **settings))


@functools.cache
def whole_batch(dtype: torch.dtype) -> EveryBatch:
    """Return random samples, equal in every process, with engine log-probs close to the policy's.

    `dtype` must be torch's default type.
    """
    batch, policy = random_batch(seed=11, samples=PROMPTS * GROUP), tiny_qwen2()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for sample, length in enumerate(batch.response_lengths.tolist()):
            noise = 0.5 * torch.randn(length, generator=generator)
            batch.rollout_log_probs[sample, :length] = on_grid(log_softmax_of(policy, batch, sample)[0] + noise)
    return batch


def batch_of(case: str) -> EveryBatch:
    """Return the batch of a case. Some cases have tokens that are one step old, or observations."""
    batch = whole_batch(torch.get_default_dtype())
    batch = with_observations(batch) if case in OBSERVING_CASES else batch
    if case not in OLDER_CASES:
        return batch
    rows, columns = torch.meshgrid(*map(torch.arange, batch.response_mask.shape), indexing="ij")
    # In every third sample all tokens are old; in the sample after it, the first three.
    return replace(batch, staleness=((rows % 3 == 0) | (rows % 3 == 1) & (columns < 3)).int())


def start_policies(case: str) -> tuple[Any, Any]:
    """Return the policy and a reference that is close enough not to reach the bounds of the KL estimate."""
    make = tiny_gemma2 if case in OWN_HEAD_CASES else tiny_qwen2
    policy, reference = make(), make()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return policy, reference


def share(batch: EveryBatch, mini_batches: int, way: str) -> tuple[EveryBatch, SampleBalance]:
    """Return this rank's rows and the balance of all rows. `way`: `plan` uses `balance_samples`, `lone` puts each
    mini-batch on one rank."""
    ranks, size = dist.get_world_size(), len(batch) // mini_batches
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    rows = range(len(batch))
    owners = {
        "plan": balance_samples(lengths, mini_batches, ranks),
        "lone": [row // size % ranks for row in rows],
    }[way]
    mine = torch.tensor([row for row in rows if owners[row] == dist.get_rank()], dtype=torch.int64)
    return batch.select(mine), SampleBalance.owned(lengths, owners, mini_batches, ranks)


def shuffled(batch: EveryBatch, mini_batches: int) -> tuple[EveryBatch, SampleBalance, Shuffle | None]:
    """Return this rank's rows of the first epoch, the balance of all samples (made on rank 0), and the shuffle."""
    coordinator = Coordinator(GlooTransport())
    rows = list(range(len(batch))) if coordinator.is_leader else []
    rollout = batch.select(torch.tensor(rows, dtype=torch.int64))
    training = SampleResharder(mini_batches, coordinator, SEED).reshard(rollout, [row // GROUP for row in rows], STEP)
    figures = {name: training.to_training.of_tokens(getattr(rollout, name)) for name in ("advantages", "returns")}
    return EveryBatch(**training.batch.present(), **figures), training.balance, training.shuffle


def padded(batch: EveryBatch, columns: int) -> EveryBatch:
    """Widen the tensors with padding whose values must not be read."""

    def pad(tensor: Tensor | None, value: float) -> Tensor:
        assert tensor is not None
        return torch.nn.functional.pad(tensor, (0, columns), value=value)

    return replace(
        batch,
        input_ids=pad(batch.input_ids, 9),
        response_mask=pad(batch.response_mask, 0.0),
        rollout_log_probs=pad(batch.rollout_log_probs, -5.0),
        advantages=pad(batch.advantages, 7.0),
        returns=pad(batch.returns, 7.0),
        staleness=None if batch.staleness is None else pad(batch.staleness, 1),
    )


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def engine(model: Any, config: ActorConfig | CriticConfig, backend: BackendConfig) -> TrainingBackend:
    return build_backend(
        model,
        backend,
        CPU,
        Training(config.optim, grad_clip=config.grad_clip, total_optimizer_steps=TOTAL_STEPS),
    )


def prepared_actor(
    case: str, config: Config, backend: BackendConfig, batch: EveryBatch, held: SampleBalance, *, packed: bool
) -> Actor:
    """Build the actor of a case, and add the log-probs for its update to `batch`. Collective."""
    mini_batches, budget = CASES[case][0], config.actor.ppo_max_token_len_per_gpu
    policy, frozen = start_policies(case)
    actor = Actor(
        engine(policy, config.actor, backend),
        config.actor,
        config.algorithm.rollout_correction,
        temperature=config.rollout.temperature,
        scale=config.actor.loss_scale_factor or config.data.max_response_length,
        log_prob_budget=budget,
        seed=SEED,
    )
    check_log_probs(actor.backend.module, CPU)  # as at the start of a run
    assert [m.whole_logits for m in actor.backend.module.modules() if isinstance(m, LogProbModel)] == [None]
    if packed:
        pack(actor.backend.module)
    if config.actor.use_kl_loss:
        reference = Fsdp2Model(frozen.requires_grad_(False), BackendConfig(), CPU)
        if packed:
            pack(reference.module)
        batch.ref_log_probs = Policy(reference, 1.0, budget).all_log_probs(batch, held)
    if needs_old_log_probs(config.actor, config.algorithm, mini_batches):
        batch.old_log_probs = actor.all_log_probs(batch, held)
        if config.actor.policy_loss.loss_mode == "kl_cov":
            batch.old_log_probs = on_grid(batch.old_log_probs)
    return actor


def prepared_critic(
    config: Config, backend: BackendConfig, batch: EveryBatch, held: SampleBalance, *, packed: bool
) -> Critic:
    """Build the critic of a case, and add its values to `batch`. Collective."""
    model = engine(tiny_value_model(), config.critic, backend)
    if packed:
        pack(model.module)
    scale = config.actor.loss_scale_factor or config.data.max_response_length
    budget = config.critic.ppo_max_token_len_per_gpu
    critic = Critic(model, config.critic, scale=scale, budget=budget, forward_budget=budget)
    batch.values = critic.all_values(batch, held)
    return critic


def run_update(
    case: str, budget: int, extra_columns: int, way: str = "plan", backend: BackendConfig | None = None
) -> dict[str, Any]:
    """Run one update with packed sequences on this process group. Extra columns are padding.

    Returns weights, gradients of every optimizer step (FSDP2 only), metrics and reported micro-batches (done, total).
    """
    backend, packed = backend or BackendConfig(), not extra_columns
    mini_batches, config = CASES[case]
    config = with_optim(case, config, ppo_max_token_len_per_gpu=budget)
    shuffle: Shuffle | None = None
    if config.actor.shuffle:
        mine, held, shuffle = shuffled(batch_of(case), mini_batches)
    else:
        mine, held = share(batch_of(case), mini_batches, way)
    batch = padded(mine, extra_columns)
    role: Actor | Critic
    if case in ACTOR_CASES:
        role = prepared_actor(case, config, backend, batch, held, packed=packed)
    else:
        role = prepared_critic(config, backend, batch, held, packed=packed)
    gradients: list[dict[str, Tensor]] = []

    def keep_gradients(event: str) -> None:
        if event == "update.mid":
            named = role.backend.module.named_parameters()
            gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})

    micro_batches: list[tuple[int, int]] = []
    events._listeners[:] = [keep_gradients]
    events._followers[:] = [lambda phase, done, total: micro_batches.append((done, total))]
    guards = Guards(GuardsConfig())
    guards.begin(1, 0.0)
    metrics = {
        name.removeprefix("actor/").removeprefix("critic/"): v
        for name, v in role.update(batch, held, guards, shuffle).items()
    }
    updates = mini_batches * (config.actor if case in ACTOR_CASES else config.critic).ppo_epochs
    assert role.backend.extra_state()["steps_taken"] == {"optimizer_step": updates, "training_step": 1}
    weights = {name: tensor.clone() for name, tensor in role.backend.full_tensors()}
    return {"weights": weights, "gradients": gradients, "metrics": metrics, "micro_batches": micro_batches}
