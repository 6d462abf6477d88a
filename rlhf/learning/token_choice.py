"""Chooses the tokens of a mini-batch, over all ranks, that a policy loss treats specially (`clip_cov`, `kl_cov`)."""

import torch
from torch import Tensor

from rlhf.algorithms.covariance import OverRanks, covariances, smallest
from rlhf.algorithms.losses import vanilla
from rlhf.batch import ActorBatch
from rlhf.config import ActorConfig
from rlhf.config.algorithm_table import POLICY_LOSSES
from rlhf.ranks.collectives import all_gather, all_sum
from rlhf.rollout.sampling import fold, row_keys

# Makes this noise differ from the noise of sampling, which has the same key.
PURPOSE = 0x636C6970
RANKS = OverRanks(all_sum, all_gather)


class TokenChoice:
    """Chooses tokens by the covariance of log-probs and advantages: the largest (`kl_cov`), or random ones in a range.

    A hash of (seed, step, uid, sample, position) decides ties and random choices. So the choice does not depend on the
    number of ranks, the micro-batches, or the state of a random generator.
    """

    def __init__(self, config: ActorConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self.kind = POLICY_LOSSES.get(config.policy_loss.loss_mode, "none")

    def choose(self, batch: ActorBatch, mask: Tensor, log_probs: Tensor, step: int) -> Tensor:
        """Return [N, R] float32, 1 on the chosen tokens. Collective.

        At least one token is chosen over all ranks if there is a candidate.

        Args:
            mask: [N, R] bool, True on the tokens of the mini-batch that the loss counts.
            log_probs: [N, R], by the current policy.
        """
        config = self._config.policy_loss
        values, tokens = covariances(log_probs, batch.advantages, mask, RANKS)
        if self.kind == "largest":
            candidates, order, share = mask, -values, config.kl_cov_ratio
        else:
            old = log_probs if batch.old_log_probs is None else batch.old_log_probs
            clipped = vanilla(log_probs, old, batch.advantages, mask, self._config).metrics["pg_clipfrac"]
            inside = (values > config.clip_cov_lb) & (values < config.clip_cov_ub)
            candidates, share = mask & inside & (clipped == 0), config.clip_cov_ratio
            order = torch.zeros_like(values)
        count = max(int(share * tokens), 1)
        return smallest(order, self._keys(batch, step), candidates, count, RANKS).float()

    def _keys(self, batch: ActorBatch, step: int) -> Tensor:
        """Return the noise of each token, [N, R] int64."""
        rows = fold(row_keys(self._seed, step, batch.uids, batch.numbers), torch.full_like(batch.uids, PURPOSE))
        positions = torch.arange(batch.response_mask.shape[1], device=rows.device)
        return fold(rows[:, None].expand(-1, len(positions)), positions.expand(len(rows), -1))
