"""Choice of the tokens of a mini-batch that a policy loss treats otherwise than the rest, over all ranks."""

import torch
from torch import Tensor

from rlhf.algorithms.covariance import OverRanks, covariances, first
from rlhf.algorithms.losses import vanilla
from rlhf.batch import ActorBatch
from rlhf.config import ActorConfig
from rlhf.config.algorithm_table import POLICY_LOSSES, PolicyLossNeeds
from rlhf.ranks.collectives import all_gather, all_sum
from rlhf.rollout.sampling import fold, row_keys

# Apart from the noise that drew the tokens, which has the same coordinates.
PURPOSE = 0x636C6970
RANKS = OverRanks(all_sum, all_gather)


class TokenChoice:
    """Chooses tokens by the covariance of their log-probs and advantages, as the run's policy loss asks for.

    Of equally good tokens, and of all candidates where the choice is random, a hash of (seed, step, uid, sample,
    position) decides: nothing depends on ranks, on the split into micro-batches or on a generator's state.

    Args:
        seed: of the run.
    """

    def __init__(self, config: ActorConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self.kind = POLICY_LOSSES.get(config.policy_loss.loss_mode, PolicyLossNeeds()).chosen

    def choose(self, batch: ActorBatch, mask: Tensor, log_probs: Tensor, step: int) -> Tensor:
        """[N, R] float32, 1 on the tokens that are chosen, at least one of all ranks' if there is a candidate.
        Collective.

        Args:
            batch: this rank's.
            mask: [N, R], 1 on the tokens of the mini-batch that the loss counts.
            log_probs: [N, R] of the policy now.
        """
        config = self._config.policy_loss
        values, tokens = covariances(log_probs, batch.advantages, mask, RANKS)
        if self.kind == "largest":
            candidates, order, share = mask.bool(), -values, config.kl_cov_ratio
        else:
            old = log_probs if batch.old_log_probs is None else batch.old_log_probs
            clipped = vanilla(log_probs, old, batch.advantages, mask, self._config).figures["pg_clipfrac"]
            inside = (values > config.clip_cov_lb) & (values < config.clip_cov_ub)
            candidates, share = mask.bool() & inside & (clipped == 0), config.clip_cov_ratio
            order = torch.zeros_like(values)
        count = max(int(share * tokens), 1)
        return first(order, self._keys(batch, step), candidates, count, RANKS).float()

    def _keys(self, batch: ActorBatch, step: int) -> Tensor:
        """int64 [N, R] noise of each token."""
        rows = fold(row_keys(self._seed, step, batch.uids, batch.numbers), torch.full_like(batch.uids, PURPOSE))
        positions = torch.arange(batch.response_mask.shape[1], device=rows.device)
        return fold(rows[:, None].expand(-1, len(positions)), positions.expand(len(rows), -1))
