"""The endless, shuffled stream of training prompts, whose whole state is one number."""

import logging
from typing import Any

import numpy as np

from rlhf.data.items import DrawnPrompt, Prompt
from rlhf.data.prompts import PromptSet
from rlhf.errors import UserError

log = logging.getLogger(__name__)


class PromptStream:
    """Walks over `prompts` for ever; the order of an epoch follows from (seed, epoch) alone.

    `allow_change` lets a saved state go on with other prompts than those that it was taken on.
    """

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool, *, allow_change: bool = False):
        self._prompts, self._seed, self._shuffle, self._allow_change = prompts, seed, shuffle, allow_change
        self._consumed = 0
        self._order_epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def epochs(self) -> float:
        """Passes over the prompts before the next one; without the fraction, the epoch that it belongs to."""
        return self._consumed / len(self._prompts)

    def next(self, n: int) -> list[DrawnPrompt]:
        """The next `n` prompts."""
        positions = range(self._consumed, self._consumed + n)
        drawn = [DrawnPrompt(position, self.at(position)) for position in positions]
        self._consumed += n
        return drawn

    def at(self, position: int) -> Prompt:
        """The prompt at a place of the stream."""
        epoch, offset = divmod(position, len(self._prompts))
        if not self._shuffle:
            return self._prompts[offset]
        if epoch != self._order_epoch:
            # Sorting raw bits instead of Generator.permutation: NumPy guarantees only the bits across its versions.
            bits = np.random.Philox(key=[self._seed, epoch]).random_raw(len(self._prompts))
            self._order_epoch, self._order = epoch, np.argsort(bits, kind="stable")
        return self._prompts[int(self._order[offset])]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the future of the stream depends on, as plain JSON values."""
        return {"consumed": self._consumed, "fingerprint": self._prompts.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises UserError if the prompts are not the ones that it was taken on, unless `allow_change`.
        """
        if state["fingerprint"] != self._prompts.fingerprint:
            message = (
                f"The training prompts (data.train_files or data.reasoning_gym) are not those of the checkpoint: "
                f"fingerprint {self._prompts.fingerprint}, the checkpoint has {state['fingerprint']}."
            )
            if not self._allow_change:
                raise UserError(f"{message} Restore the data, or set trainer.allow_config_change=true to go on.")
            log.warning("%s Going on with the new prompts, as trainer.allow_config_change=true asks.", message)
        self._consumed = state["consumed"]
