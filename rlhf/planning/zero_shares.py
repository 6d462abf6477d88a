"""Memory of ZeRO: what DeepSpeed holds of the weights in training, and the buffers that their gradients go through.

Read in DeepSpeed 0.19 as `rlhf.backends.deepspeed` sets it (Rajbhandari et al., arXiv 1910.02054, section 5), and
measured. Fresh memory counts from its allocation on: `trainer.deterministic` fills it.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from rlhf.config.buffer_sizes import REDUCE_BUCKET

LIVE_PARAMETERS = 1_000_000_000
"""Elements that ZeRO 3 keeps gathered at most: DeepSpeed's default of `stage3_max_live_parameters`."""
PREFETCHED = 50_000_000
"""Elements that ZeRO 3 gathers together: DeepSpeed's default of `stage3_prefetch_bucket_size`."""
MOMENTS = 2
"""AdamW's tensors per weight."""


@dataclass(frozen=True)
class ZeroShares:
    """Bytes of `count` weights in training on one of `ranks`, at a stage, in passes in a type of `width` bytes."""

    count: int
    stage: int
    width: int
    ranks: int

    @property
    def share(self) -> int:
        """Float32 bytes of the weights that this rank steps."""
        return 4 * (math.ceil(self.count / self.ranks) if self.stage else self.count)

    @property
    def optimizer(self) -> int:
        """Master weights, a copy even where the module's are float32, and moments."""
        return (self.share if self.stage or self.width == 2 else 0) + MOMENTS * self.share

    @property
    def gradients(self) -> int:
        """There from the first backward pass of an optimizer step on; those of stage 3 are among what is `standing`."""
        return [self.width * self.count, self.width * self.count, self.share, 0][self.stage]

    @property
    def standing(self) -> int:
        """Buffers that stay for good: at stage 3 of a rank's gradients and of the bucket, at stage 1 in bfloat16, which
        an optimizer of its own is for (BF16_Optimizer), of all gradients in float32."""
        if self.stage == 3:
            return self.share + self._bucket(4)
        return 4 * self.count if self._has_sums else 0

    @property
    def bucket(self) -> int:
        """Buffer that backward passes copy gradients into, from which they are reduced; at stage 3 it is standing."""
        return self._bucket(self.width) if self.stage in (1, 2) and not self._has_sums else 0

    @property
    def added(self) -> int:
        """A rank's part of the gradients of a micro-batch, beside the sum of those before; bfloat16 ones are added to
        it where they arrive."""
        return self.share if self.stage == 2 and self.width == 4 else 0

    @property
    def reduced(self) -> int:
        """Copies of what is reduced, beside bucket and gradients, at the end of a backward pass: at stage 3 of the
        bucket, in the order of the ranks and for the wire; at stage 2 of the part of one of several ranks."""
        if self.stage == 3:
            return 2 * self._bucket(4)
        several = self.stage == 2 and self.ranks > 1
        return (self.share if self.width == 4 else 3 * self.share // 2) if several else 0

    @property
    def stepped(self) -> int:
        """In the optimizer's step: a rank's gradients put together. At stage 1 they are reduced only then, where the
        bucket or the parts of the ranks are there, or, in bfloat16, a copy for the wire."""
        if self.stage == 1:
            parts = self.share * (2 if self.ranks > 1 else 1)
            return self._bucket(4) if self._has_sums else max(self.bucket, parts)
        return 0 if self.stage == 2 and self.width == 2 else self.share

    @cached_property
    def _has_sums(self) -> bool:
        return self.stage == 1 and self.width == 2

    def _bucket(self, width: int) -> int:
        return width * min(REDUCE_BUCKET, self.count)


def live_weights(whole: int, count: int, stage: int, ranks: int) -> int:
    """Weights of ZeRO 3 that are there whole in a pass, of `whole` bytes in `count` elements, and the buffer in which
    some of them arrive; one rank has all it needs."""
    if stage < 3 or ranks == 1:
        return 0
    width = whole / max(count, 1)
    return int(width * (min(LIVE_PARAMETERS, count) + min(PREFETCHED, count)))
