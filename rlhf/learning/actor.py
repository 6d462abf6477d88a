"""Trains the policy: its loss, its optimizer steps and their metrics."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlhf.algorithms.aggregation import loss_sum
from rlhf.algorithms.correction import accepted, effective_sample_size, rollout_is_weights, weight_sums
from rlhf.algorithms.kl import corrected_kl, kl_estimate, kl_metric
from rlhf.algorithms.lookup import load_policy_loss
from rlhf.algorithms.statistics import masked
from rlhf.backends.base import TrainingBackend
from rlhf.batch import ActorBatch
from rlhf.config import ActorConfig, RolloutCorrectionConfig
from rlhf.learning.balancing import SampleBalance
from rlhf.learning.entropy_control import EntropyControl
from rlhf.learning.guards import Guards
from rlhf.learning.policy import Policy
from rlhf.learning.resharding import Shuffle
from rlhf.learning.token_choice import TokenChoice
from rlhf.learning.update import Counts, Metrics, MicroBatchLoss, Passes, update
from rlhf.ranks.collectives import all_sum


class Actor(Policy):
    """The policy with its loss and optimizer steps.

    Args:
        temperature, log_prob_budget: `temperature` and `budget` of `Policy`.
        scale: the length that the loss mode `seq-mean-token-sum-norm` divides by.
        seed: the run's seed, for policy losses that choose tokens at random.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        config: ActorConfig,
        correction: RolloutCorrectionConfig,
        *,
        temperature: float,
        scale: int,
        log_prob_budget: int,
        seed: int = 0,
    ) -> None:
        super().__init__(backend, temperature, log_prob_budget)
        self.backend, self._config, self._correction, self._scale = backend, config, correction, scale
        self.entropy_control = EntropyControl(config)
        self._choice = TokenChoice(config, seed)
        self._policy_loss = load_policy_loss(config.policy_loss.loss_mode)
        self._passes = Passes(config.ppo_epochs, config.ppo_max_token_len_per_gpu, config.loss_agg_mode)

    def update(
        self, batch: ActorBatch, balance: SampleBalance, guards: Guards, shuffle: Shuffle | None = None
    ) -> Metrics:
        """Take the optimizer steps of a training step with `rlhf.learning.update.update`. Collective.

        Return `actor/...` and `rollout/...` metrics. `batch` has `old_log_probs` if
        `rlhf.config.derived.needs_old_log_probs` returns True. If a log-prob of the rollout engine is not finite, the
        guards reject the batch.
        """
        rejected: Metrics = {}
        sampled = all_sum(masked(batch.rollout_log_probs, batch.response_mask).double().sum()).item()
        # Check here that log-probs are finite: comparisons with NaN are false, so `_reject` would silently mask the
        # tokens.
        rejection, old = self._correction.rollout_rs, batch.old_log_probs
        if guards.allows("actor", rollout_log_probs=sampled) and rejection is not None and old is not None:
            batch, rejected = self._reject(batch, old, rejection)
        weights: list[Tensor] = []
        before, after = partial(self._with_chosen, guards.step), self._adapt_bonus
        loss = partial(self._micro_batch_loss, weights)
        metrics = rejected | update(
            self.backend, batch, balance, self._passes, loss, guards, "actor", shuffle, before, after
        )
        if weights:  # true on all ranks or on none, because all have equally many micro-batches
            sums = all_sum(torch.stack(weights).sum(dim=0))
            if sums[0] > 0:  # `sums[0]` is the number of tokens
                metrics["rollout/is_eff_sample_size"] = effective_sample_size(sums)
        return {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}

    def _micro_batch_loss(self, seen: list[Tensor], micro: ActorBatch, counts: Counts) -> MicroBatchLoss:
        """Return the loss of a micro-batch, and append the sums of its importance weights, if any, to `seen`."""
        config, mask, counted = self._config, micro.response_mask.float(), micro.counted.float()

        def aggregate(values: Tensor) -> Tensor:
            return loss_sum(values, counted, config.loss_agg_mode, self._scale) / counts.loss

        def token_mean(values: Tensor) -> Tensor:
            return loss_sum(values.detach(), mask, "token-mean") / counts.tokens

        log_probs, entropy = self.log_probs(micro, with_entropy=config.needs_entropy)
        old = micro.old_log_probs if micro.old_log_probs is not None else log_probs.detach()
        chosen = () if micro.chosen is None else (micro.chosen,)
        losses, of_loss = self._policy_loss(log_probs, old, micro.advantages, counted, config, *chosen)
        metrics: dict[str, Tensor] = {}
        weights: Tensor | None = None
        if (weighing := self._importance_weights(micro, old)) is not None:
            weights, truncated = weighing
            losses = losses * weights
            seen.append(weight_sums(weights, mask))
            metrics |= {"rollout/is_mean": weights, "rollout/is_truncated": truncated}
        pg_loss = aggregate(losses)
        loss, terms = pg_loss, {"pg_loss": pg_loss}
        if config.kl_in_loss and micro.ref_log_probs is not None:
            terms["kl_loss"] = aggregate(self._kl_to_reference(log_probs, old, micro.ref_log_probs, weights))
            loss = loss + config.kl_loss_coef * terms["kl_loss"]
        metrics |= {"kl": kl_metric(old, log_probs)}
        if entropy is not None:
            metrics["entropy"] = entropy
            if self.entropy_control.weight:
                loss = loss - self.entropy_control.weight * aggregate(entropy)
        if micro.ref_log_probs is not None:
            metrics["ref_kl"] = kl_metric(log_probs, micro.ref_log_probs)
        mismatch = masked(old - micro.rollout_log_probs, mask).abs()
        metrics |= {
            "rollout/logprob_diff_mean": mismatch,
            "rollout/kl": kl_metric(micro.rollout_log_probs, old),
        }
        means = {name: token_mean(values) for name, values in metrics.items()}
        # Rejected tokens have no part in the loss, so they have none in the loss's own metrics.
        for name, values in of_loss.items():
            means[name] = loss_sum(values.detach(), counted, "token-mean") / counts.counted
        largest = mismatch.max() if mismatch.numel() else mismatch.new_zeros(())
        return MicroBatchLoss(loss, terms, means, largest)

    @torch.no_grad()
    def _with_chosen(self, step: int, batch: ActorBatch, plan: list[list[int]]) -> ActorBatch:
        """Return the batch with `chosen` set for a mini-batch, if the policy loss needs it. Collective.

        `plan` lists the mini-batch's rows by micro-batch. The choice depends on the current policy, so it costs one
        more forward pass.
        """
        if self._choice.kind == "none":
            return batch
        log_probs, mask = torch.zeros_like(batch.rollout_log_probs), torch.zeros_like(batch.counted)
        for rows in plan:
            of_rows, _ = self.log_probs(batch.micro_batch(rows), with_entropy=False)
            if rows:
                log_probs[rows, : of_rows.shape[1]] = of_rows
                mask[rows] = batch.counted[rows]
        return replace(batch, chosen=self._choice.choose(batch, mask, log_probs, step))

    def _adapt_bonus(self, metrics: Metrics) -> Metrics:
        """Adapt the weight of the entropy bonus after an optimizer step, and return the step's weight as a metric."""
        if not self.entropy_control.is_adaptive:
            return {}
        weight = self.entropy_control.weight
        self.entropy_control.observe(metrics["entropy"])
        return {"entropy_coeff": weight}

    def _kl_to_reference(self, log_probs: Tensor, old: Tensor, ref: Tensor, weights: Tensor | None) -> Tensor:
        """Return the KL in the loss, [N, R]. `weights` are the importance weights from the sampling policy to `old`."""
        if not self._config.use_bias_correction_kl:
            return kl_estimate(log_probs, ref, self._config.kl_loss_type)
        kl = corrected_kl(log_probs, old, ref, self._config.kl_loss_type)
        return kl if weights is None else weights * kl

    def _reject(self, batch: ActorBatch, old: Tensor, kind: str) -> tuple[ActorBatch, Metrics]:
        """Return the batch with a loss mask that is 0 where old policy and rollout engine differ too much.

        Also return, as metrics over all ranks, the fractions of masked tokens and of responses with a masked token.
        Collective.
        """
        bounds = self._correction.rollout_rs_threshold, self._correction.rollout_rs_threshold_lower
        assert bounds[0] is not None
        mask = batch.response_mask
        kept = accepted(old, batch.rollout_log_probs, mask, kind, bounds[0], bounds[1])
        left_out = mask & ~kept
        shares = [left_out.sum(), mask.sum(), (left_out.sum(dim=1) > 0).sum(), (mask.sum(dim=1) > 0).sum()]
        tokens, of_tokens, responses, of_responses = all_sum(torch.stack(shares).double()).tolist()
        metrics = {
            "rollout/rs_masked": tokens / max(of_tokens, 1.0),
            "rollout/rs_seq_masked": responses / max(of_responses, 1.0),
        }
        return replace(batch, loss_mask=kept), metrics

    def _importance_weights(self, micro: ActorBatch, old: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return importance weights of the losses and which weights are truncated, [N, R] each; None without weights.

        The weights correct from the sampling policy to the policy before the update, around which the loss clips. This
        is the decoupled objective of Hilton et al. (arXiv 2110.00641), as in AReaL (arXiv 2505.24298). Without
        `rollout_is`, only stale tokens are weighted: a token that the current policy drew has the weight 1, even in a
        response that an older policy began.
        """
        mask, correction, level = micro.response_mask.float(), self._correction, self._correction.rollout_is
        bounds = correction.rollout_is_threshold, correction.rollout_is_threshold_lower
        if level is not None:
            return rollout_is_weights(old, micro.rollout_log_probs, mask, level, *bounds)
        if micro.staleness is None:
            return None
        weights, truncated = rollout_is_weights(old, micro.rollout_log_probs, mask, "token", *bounds)
        older = micro.staleness > 0
        return torch.where(older, weights, mask), truncated * older
