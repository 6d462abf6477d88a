"""Estimates the advantage of each response token from token rewards."""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.statistics import backward_sum, masked, masked_whiten
from rlhf.config import AlgorithmConfig

GROUP_EPSILON = 1e-6


def only_rank(tensor: Tensor) -> Tensor:
    """Return `tensor` unchanged, because the sum over a single rank is the tensor itself."""
    return tensor


@dataclass(frozen=True)
class EstimatorInput:
    """Rewards of N responses on one rank, with values and baselines. R is the length of the longest response."""

    token_rewards: Tensor
    """[N, R]: the score on the last token in the mask, minus each token's KL penalty if the reward includes the KL."""
    mask: Tensor
    """[N, R], 1 on the tokens that the policy wrote. The mask may have holes, and rows may be empty."""
    group_size: int
    """Responses per prompt. Responses to one prompt are consecutive rows of one rank."""
    values: Tensor | None = None
    """[N, R]: the critic's value before each token."""
    baselines: Tensor | None = None
    """[N]: the reward of the greedy response to the same prompt."""
    all_sum: Callable[[Tensor], Tensor] = only_rank
    """Returns the sum of a small tensor over ranks, and may overwrite its argument.

    An estimator must call `all_sum` equally often on every rank.
    """
    failed: Tensor | None = None
    """[N] bool: responses without a score, whose environment failed; None if there are none."""

    @property
    def scores(self) -> Tensor:
        """Each response's summed reward, [N] float64."""
        return masked(self.token_rewards, self.mask).double().sum(dim=1)


class Estimate(NamedTuple):
    """Result of an estimator."""

    advantages: Tensor
    """[N, R] in the type of the rewards, zero outside the mask."""
    returns: Tensor | None = None
    """[N, R]: the critic's targets, zero outside the mask."""


def gae(inputs: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Return generalized advantage estimates (GAE), whitened over the response tokens of all ranks; needs `values`.

    delta_t = r_t + gamma * V_next - V_t and A_t = delta_t + gamma * lam * A_next, where next is the next token in the
    mask; V_next and A_next are 0 after the last token. returns = A + V, before whitening.

    Source: Schulman et al. (arXiv 1506.02438) equation 16.
    """
    assert inputs.values is not None
    mask = inputs.mask
    values = masked(inputs.values, mask).double()
    rewards = masked(inputs.token_rewards, mask).double()
    # Columns outside the mask pass on the value of the next token in the mask.
    ahead = backward_sum(values, 1.0 - mask.double())
    deltas = masked(rewards + config.gamma * torch.nn.functional.pad(ahead, (0, 1))[:, 1:] - values, mask)
    advantages = masked(backward_sum(deltas, _decays(mask, config.gamma * config.lam)), mask)
    whitened = masked_whiten(advantages, mask, inputs.all_sum)
    dtype = inputs.token_rewards.dtype
    return Estimate(whitened.to(dtype), (advantages + values).to(dtype))


def grpo(inputs: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Return (s - mean) / (std + 1e-6) on every token of a response, where s is the response's summed reward.

    Mean and unbiased std are over the responses to the same prompt.

    For a group of one, mean is 0 and std is 1. `norm_adv_by_std_in_grpo=false` (Dr.GRPO) omits the division.

    Source: DeepSeekMath (arXiv 2402.03300) section 4.1.2; Dr.GRPO (arXiv 2503.20783) section 3.2.
    """

    def normalized(groups: Tensor) -> Tensor:
        # In float64, because the division would amplify the rounding error of the mean of equal rewards.
        alone = groups.shape[1] == 1
        advantages = groups if alone else groups - groups.mean(dim=1, keepdim=True)
        if config.norm_adv_by_std_in_grpo:
            deviations = torch.ones_like(groups) if alone else groups.std(dim=1, keepdim=True)
            advantages = advantages / (deviations + GROUP_EPSILON)
        return advantages

    return Estimate(_on_tokens(_of_groups(inputs, normalized), inputs))


def rloo(inputs: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Return the score minus the mean score of the prompt's other responses: n / (n - 1) * (s - mean), or s if n = 1.

    Source: Ahmadian et al. (arXiv 2402.14740) section 3.
    """

    def left_out(groups: Tensor) -> Tensor:
        n = groups.shape[1]
        return groups if n == 1 else (groups - groups.mean(dim=1, keepdim=True)) * (n / (n - 1))

    return Estimate(_on_tokens(_of_groups(inputs, left_out), inputs))


def reinforce_plus_plus(inputs: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Return the reward-to-go of each token, discounted by `gamma` per token, whitened over all ranks.

    Source: REINFORCE++ (arXiv 2501.03262) section 3.
    """
    rewards = masked(inputs.token_rewards, inputs.mask).double()
    togo = backward_sum(rewards, _decays(inputs.mask, config.gamma))
    return Estimate(masked_whiten(togo, inputs.mask, inputs.all_sum).to(inputs.token_rewards.dtype))


def reinforce_plus_plus_baseline(inputs: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Return the score minus the group's mean on every token, whitened over all ranks. A group of one has mean 0.

    Source: REINFORCE++ with baseline (arXiv 2501.03262) section 3.
    """

    def centered_in(groups: Tensor) -> Tensor:
        return groups if groups.shape[1] == 1 else groups - groups.mean(dim=1, keepdim=True)

    centered = _of_groups(inputs, centered_in)
    tokens = centered.view(-1, 1).expand_as(inputs.mask)
    return Estimate(masked_whiten(tokens, inputs.mask, inputs.all_sum).to(inputs.token_rewards.dtype))


def remax(inputs: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Return the undiscounted reward-to-go of each token minus the greedy response's reward; needs `baselines`.

    Source: ReMax (arXiv 2310.10505) algorithm 1.
    """
    assert inputs.baselines is not None
    rewards = masked(inputs.token_rewards, inputs.mask).double()
    togo = backward_sum(rewards, torch.ones_like(rewards))
    advantages = masked(togo - inputs.baselines.double()[:, None], inputs.mask)
    return Estimate(advantages.to(inputs.token_rewards.dtype))


def pass_at_k(inputs: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Return the advantage of response i if only the best of k responses to a prompt counts: (m_i - m) / (s + 1e-6).

    Over all k-subsets of the n responses, m and s are mean and standard deviation of the largest score. m_i is the mean
    over only the subsets with response i. `norm_adv_by_std_in_grpo=false` omits the division. With scores of 0 and 1, m
    is the unbiased pass@k of the group.

    Source: Pass@k Training (arXiv 2508.10751), analytical derivation, for scores of 0 and 1; Pass@K Policy Optimization
    (arXiv 2505.15201) for the largest of any scores.
    """
    k = config.pass_at_k

    def best_of(groups: Tensor) -> Tensor:
        n = groups.shape[1]
        scores, order = groups.sort(dim=1, stable=True)
        # Subtract the best score: if every subset has a response with the best score, all advantages are exactly 0.
        scores = scores - scores[:, -1:]
        # Entry j is the fraction of subsets in which response j, in sorted order, is the best: of all subsets (of_all),
        # of those with response j (of_own), or of those with a given response i < j (of_lower, the same for every i).
        of_all = scores.new_tensor([comb(j, k - 1) / comb(n, k) for j in range(n)])
        of_own = scores.new_tensor([comb(j, k - 1) / comb(n - 1, k - 1) for j in range(n)])
        of_lower = scores.new_tensor(
            [comb(j - 1, k - 2) / comb(n - 1, k - 1) if j and k > 1 else 0.0 for j in range(n)]
        )
        from_each_on = (scores * of_lower).flip(1).cumsum(dim=1).flip(1)
        above = torch.nn.functional.pad(from_each_on[:, 1:], (0, 1))
        means = (scores * of_all).sum(dim=1, keepdim=True)
        advantages = scores * of_own + above - means
        if config.norm_adv_by_std_in_grpo:
            deviations = ((scores - means).square() * of_all).sum(dim=1, keepdim=True).sqrt()
            advantages = advantages / (deviations + GROUP_EPSILON)
        return advantages.gather(1, order.argsort(dim=1))

    return Estimate(_on_tokens(_of_groups(inputs, best_of, least=k), inputs))


def _of_groups(inputs: EstimatorInput, advantages_of: Callable[[Tensor], Tensor], least: int = 1) -> Tensor:
    """Return the advantage of each response among the responses of its group, [groups, group_size] float64.

    `advantages_of` computes on groups of one size, [groups, size]. Failed responses are in no group. If failures
    leave fewer than `least` responses in a group, or only one, these responses have the advantage 0.
    """
    n = inputs.group_size
    scores = inputs.scores.view(-1, n)
    if inputs.failed is None:
        return advantages_of(scores)
    counted = ~inputs.failed.view(-1, n)
    advantages, sizes = torch.zeros_like(scores), counted.sum(dim=1)
    for size in range(min(n, max(2, least)), n + 1):
        rows = counted & (sizes == size)[:, None]
        if bool(rows.any()):
            advantages[rows] = advantages_of(scores[rows].view(-1, size)).flatten()
    return advantages


def _decays(mask: Tensor, per_token: float) -> Tensor:
    """Return the discount at each position, [N, R] float64: `per_token` on response tokens, 1 elsewhere."""
    return torch.ones_like(mask, dtype=torch.float64).masked_fill(mask.bool(), per_token)


def _on_tokens(per_response: Tensor, inputs: EstimatorInput) -> Tensor:
    """Return [N, R] with each response's number on its tokens, zero outside the mask. Any shape of N numbers works."""
    spread = per_response.reshape(-1, 1).expand_as(inputs.mask)
    return masked(spread, inputs.mask).to(inputs.token_rewards.dtype)
