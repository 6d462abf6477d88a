"""Way in which samples are sent to reward processes: how many at a time, and which of their fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rlhf.reward.scores import RewardItem
from rlhf.reward.signature import FIELDS, Convention, Signature

ALONE, TOGETHER, GROUPS = "alone", "together", "groups"


@dataclass(frozen=True)
class Sending:
    """Wishes of a verifier, told when it is ready."""

    parts: str = ALONE
    """One sample at a time; as many as there are for one process, which judges them at once; all of a prompt."""
    messages: bool = False
    token_ids: bool = False
    """Whether it reads these fields of a sample."""

    @classmethod
    def for_function(cls, signature: Signature) -> "Sending":
        """Of a function of the user's."""
        alone = TOGETHER if signature.is_async else ALONE
        parts = alone if signature.convention is Convention.SAMPLE else GROUPS
        # The prompt is the messages where the data do not have it as a text.
        trl = signature.convention is Convention.TRL
        reads = trl or not {"messages", "prompt"}.isdisjoint(signature.named)
        return cls(parts, reads, trl and signature.takes("completion_ids"))

    def divided(self, items: Sequence[RewardItem], processes: int) -> list[Sequence[RewardItem]]:
        """The items in their order, as many as go into one question."""
        if self.parts == GROUPS:
            return [list(group) for _, group in groupby(items, key=lambda item: item.group)]
        size = -(-len(items) // processes) if self.parts == TOGETHER else 1
        return [items[start : start + size] for start in range(0, len(items), size or 1)]

    def fields(self, item: RewardItem) -> dict[str, object]:
        """The fields of an item that are sent, by name."""
        names = ["response", *FIELDS, "columns"]
        names += ["messages"] * self.messages
        own: dict[str, object] = {"token_ids": np.asarray(item.token_ids).tolist()} if self.token_ids else {}
        return {name: getattr(item, name) for name in names} | own

    def timeout_s(self, each_s: float, count: int) -> float:
        """Seconds for a question with `count` samples, of which each may take `each_s`."""
        if self.parts == TOGETHER:
            return each_s + _OWN_TIMEOUTS_S
        return each_s * count


_OWN_TIMEOUTS_S = 2.0
"""Later than samples that are judged at once run out of time by themselves: one by one, unless one blocks the rest."""
