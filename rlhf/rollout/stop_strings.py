"""Finds stop strings in the text of sampled tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf.rollout.engine import Request
from rlhf.rollout.sample import Sample
from rlhf.rollout.sampling_mask import mask_part


class StopStrings:
    """Finds the strings `stop` in responses, in the text of all tokens, special ones included."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        # A token has at least one byte, so a stop string that ends in the newest token spans at most this many tokens.
        self.window = max((len(s.encode()) for s in stop), default=0) + 1

    def end_in(self, token_ids: np.ndarray) -> bool:
        """Return whether the last token completes a stop string, if the tokens before it contain no stop string."""
        if not self._found_in(token_ids[-self.window :]):
            return False
        # The last tokens alone may decode differently (a cut character, a dropped space), so check all tokens, too.
        return len(token_ids) <= self.window or self._found_in(token_ids)

    def _found_in(self, token_ids: np.ndarray) -> bool:
        text = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(s in text for s in self._stop)


def cut_at_seam(sample: Sample, request: Request, tokenizer: Any) -> Sample:
    """Cut the sample after a stop string that begins in the response so far and ends in the new tokens.

    vLLM looks for stop strings only in the new tokens.
    """
    if not request.start or not request.params.stop:
        return sample
    stop_strings = StopStrings(tokenizer, request.params.stop)
    for end in range(request.start + 1, min(len(sample), request.start + stop_strings.window) + 1):
        if stop_strings.end_in(sample.token_ids[request.turn_start : end]):
            new = slice(request.start, end)
            mask, version = mask_part(sample.sampling_mask, request.start, end), sample.versions[-1][0]
            return request.answered(sample.token_ids[new], sample.log_probs[new], "stop", version, mask)
    return sample
