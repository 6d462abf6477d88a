"""Draws training prompts in an endless shuffled stream, whose whole state is one number."""

import logging
from typing import Any

import numpy as np

from rlhf.config.compare import NEW_RUN
from rlhf.data.items import DrawnPrompt, Prompt
from rlhf.data.prompts import PromptSet
from rlhf.errors import UserError

log = logging.getLogger(__name__)


class PromptStream:
    """Draws from `prompts` without end. The order of an epoch depends only on (seed, epoch).

    With `allow_change`, a saved state may continue with other prompts than the checkpoint's. If the `held_out` prompts
    differ from the checkpoint's, the stream only logs a warning (none if `quiet`), because they affect only metrics.
    """

    def __init__(
        self,
        prompts: PromptSet,
        seed: int,
        shuffle: bool,
        *,
        allow_change: bool = False,
        held_out: PromptSet | None = None,
        quiet: bool = False,
    ):
        self._prompts, self._seed, self._shuffle, self._allow_change = prompts, seed, shuffle, allow_change
        self._held_out = None if held_out is None else f"{held_out.fingerprint} {held_out.tokens_fingerprint}"
        self._quiet = quiet
        self._consumed = 0
        self._order_epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def epochs(self) -> float:
        """Return the passes over the prompts so far; the integer part is the next prompt's epoch."""
        return self.epochs_at(self._consumed)

    def epochs_at(self, position: int) -> float:
        """Return the passes over the prompts before a position of the stream."""
        return position / len(self._prompts)

    def next(self, n: int) -> list[DrawnPrompt]:
        """Return the next `n` prompts."""
        positions = range(self._consumed, self._consumed + n)
        drawn = [DrawnPrompt(position, self.at(position)) for position in positions]
        self._consumed += n
        return drawn

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position of the stream."""
        epoch, offset = divmod(position, len(self._prompts))
        if not self._shuffle:
            return self._prompts[offset]
        if epoch != self._order_epoch:
            # Sort raw bits instead of using Generator.permutation: only the bits are the same in all NumPy versions.
            bits = np.random.Philox(key=[self._seed, epoch]).random_raw(len(self._prompts))
            self._order_epoch, self._order = epoch, np.argsort(bits, kind="stable")
        return self._prompts[int(self._order[offset])]

    def state_dict(self) -> dict[str, Any]:
        """Return all state of the stream as plain JSON values."""
        prompts = self._prompts
        return {
            "consumed": self._consumed,
            "fingerprint": prompts.fingerprint,
            "tokens_fingerprint": prompts.tokens_fingerprint,
        } | ({} if self._held_out is None else {"held_out": self._held_out})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raise UserError if the prompts differ from the state's, unless `allow_change`."""
        prompts = self._prompts
        # Checkpoints of release 0.1.0 have no hash of the tokens.
        tokens = state.get("tokens_fingerprint", prompts.tokens_fingerprint)
        if state["fingerprint"] != prompts.fingerprint:
            self._reject(
                "The training prompts (data.train_files, data.custom_cls or data.reasoning_gym) differ from the "
                f"checkpoint's: fingerprint {prompts.fingerprint}, the checkpoint has {state['fingerprint']}.",
                "Restore the data",
            )
        elif tokens != prompts.tokens_fingerprint:
            self._reject(
                "The tokens of the training prompts differ from the checkpoint's (fingerprint "
                f"{prompts.tokens_fingerprint}, the checkpoint has {tokens}), because the tokenizer, the chat template "
                "or the release of transformers has changed.",
                "Restore it",
            )
        self._consumed = int(state["consumed"])
        held_out = state.get("held_out")
        if not self._quiet and None not in (held_out, self._held_out) and held_out != self._held_out:
            log.warning(
                "The held-out prompts (data.val_files, data.custom_cls or data.reasoning_gym) or their tokens differ "
                "from the checkpoint's: val metrics before and after this resume measure different prompts, and "
                "checkpoint.keep_best compares them. Restore the data if this was not intended."
            )

    def _reject(self, message: str, remedy: str) -> None:
        if not self._allow_change:
            raise UserError(f"{message} {remedy}, set trainer.allow_config_change=true to continue, or {NEW_RUN}.")
        log.warning("%s Continuing with the new prompts (trainer.allow_config_change=true).", message)
