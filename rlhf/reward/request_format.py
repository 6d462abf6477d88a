"""Decides how samples are batched for reward processes and which fields are sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rlhf.reward.scores import RewardItem
from rlhf.reward.signature import FIELDS, Convention, Signature

SINGLE, CONCURRENT, PROMPT_GROUP = "single", "concurrent", "prompt_group"


@dataclass(frozen=True)
class RequestFormat:
    """Batching and fields of the requests to one verifier, as its reward process reports them after the start."""

    parts: str = SINGLE
    """Samples of one request. `SINGLE`: one sample. `CONCURRENT`: an equal part for each process, which scores these
    samples concurrently. `PROMPT_GROUP`: all samples of one prompt."""
    messages: bool = False
    token_ids: bool = False
    """Whether to send the messages, and the token ids, of each sample."""

    @classmethod
    def for_function(cls, signature: Signature) -> "RequestFormat":
        alone = CONCURRENT if signature.is_async else SINGLE
        parts = alone if signature.convention is Convention.SAMPLE else PROMPT_GROUP
        # The argument `prompt` is the messages if the data have no prompt column.
        trl = signature.convention is Convention.TRL
        reads = trl or not {"messages", "prompt"}.isdisjoint(signature.named)
        return cls(parts, reads, trl and signature.accepts("completion_ids"))

    def split(self, items: Sequence[RewardItem], processes: int) -> list[Sequence[RewardItem]]:
        """Split the items, in order, into one part per request."""
        if self.parts == PROMPT_GROUP:
            return [list(group) for _, group in groupby(items, key=lambda item: item.group)]
        size = -(-len(items) // processes) if self.parts == CONCURRENT else 1
        return [items[start : start + size] for start in range(0, len(items), size or 1)]

    def fields(self, item: RewardItem) -> dict[str, object]:
        names = ["response", *FIELDS, "columns"]
        names += ["messages"] * self.messages + ["conversation"] * bool(item.conversation)
        own: dict[str, object] = {"token_ids": np.asarray(item.token_ids).tolist()} if self.token_ids else {}
        return {name: getattr(item, name) for name in names} | own

    def timeout_s(self, each_s: float, count: int) -> float:
        """Return the timeout of a request with `count` samples. `each_s` is the timeout of one sample."""
        if self.parts == CONCURRENT:
            return each_s + _OWN_TIMEOUTS_S
        return each_s * count


_OWN_TIMEOUTS_S = 2.0
"""Extra seconds of a concurrent request, so that each sample's own timeout fires first unless a sample blocks."""
