"""Joins the rows of each sample to one sequence for the advantages, and splits the sequences into the rows again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.batch import RolloutBatch


@dataclass(frozen=True)
class JoinedRows:
    """Layout of S samples with N rows in all. A sample joins its rows in order of time, to at most F response tokens.

    If an agent rewrites its history, its episode has several rows. For the estimators the rows are one trajectory, as
    if the histories were observations: one sample in its group, one reward on its last token. With values, GAE goes on
    from a row's last token to the next row's first sampled token: the agent's rewriting is the environment's transition
    between these two states.
    """

    _rows: Tensor
    """[N, R] bool: the tokens of the rows' responses."""
    _samples: Tensor
    """[S, F] bool: the same tokens, in the same order."""

    @classmethod
    def of(cls, batch: RolloutBatch) -> "JoinedRows | None":
        """Return the layout of a batch; None if each row is a sample."""
        if batch.samples is None:
            return None
        lengths = batch.response_lengths
        totals = torch.zeros(len(batch.scores), dtype=lengths.dtype, device=lengths.device)
        totals = totals.index_add(0, batch.samples, lengths)
        return cls(_inside(lengths, batch.response_mask.shape[1]), _inside(totals, int(totals.max())))

    def join(self, values: Tensor) -> Tensor:
        """Return values of response tokens, [N, R], as [S, F]; zero on padding."""
        joined = values.new_zeros(self._samples.shape)
        joined[self._samples] = values[self._rows]
        return joined

    def split(self, values: Tensor) -> Tensor:
        """Return [S, F] as [N, R], the reverse of `join`."""
        rows = values.new_zeros(self._rows.shape)
        rows[self._rows] = values[self._samples]
        return rows


def _inside(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths[:, None]
