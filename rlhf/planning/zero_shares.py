"""Counts the memory of ZeRO: DeepSpeed's state of the trained weights, and the buffers of gradient reduction.

The numbers follow the code of DeepSpeed 0.19 as `rlhf.backends.deepspeed` configures it (Rajbhandari et al., arXiv
1910.02054, section 5), and were compared with measurements. Memory counts from its allocation, not from its first use,
because `trainer.deterministic` makes torch fill new memory at once.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from rlhf.config.buffer_sizes import REDUCE_BUCKET

LIVE_PARAMETERS = 1_000_000_000
"""Largest number of elements that ZeRO 3 keeps gathered: default of DeepSpeed's `stage3_max_live_parameters`."""
PREFETCHED = 50_000_000
"""Elements that ZeRO 3 gathers together: default of DeepSpeed's `stage3_prefetch_bucket_size`."""
MOMENTS = 2
"""AdamW's tensors per weight."""


@dataclass(frozen=True)
class ZeroShares:
    """Bytes that each of `ranks` needs for `count` trained weights at a ZeRO stage.

    `width` is the number of bytes of a weight in forward and backward passes.
    """

    count: int
    stage: int
    width: int
    ranks: int

    @property
    def share(self) -> int:
        """Return the float32 bytes of the weights that this rank updates."""
        return 4 * (math.ceil(self.count / self.ranks) if self.stage else self.count)

    @property
    def optimizer(self) -> int:
        """Return the bytes of Adam's moments and master weights. Stage 0 in float32 has no separate master weights."""
        return (self.share if self.stage or self.width == 2 else 0) + MOMENTS * self.share

    @property
    def gradients(self) -> int:
        """Return the bytes of gradients from the first backward pass on; stage 3 counts them in `permanent`."""
        return [self.width * self.count, self.width * self.count, self.share, 0][self.stage]

    @property
    def permanent(self) -> int:
        """Return the bytes of permanent buffers.

        At stage 3 the buffers hold the rank's gradients and the bucket. At stage 1 in bfloat16 (BF16_Optimizer) they
        hold all gradients in float32.
        """
        if self.stage == 3:
            return self.share + self._bucket(4)
        return 4 * self.count if self._has_sums else 0

    @property
    def bucket(self) -> int:
        """Return the bytes of the buffer from which gradients are reduced; stage 3 counts it in `permanent`."""
        return self._bucket(self.width) if self.stage in (1, 2) and not self._has_sums else 0

    @property
    def micro_batch_gradients(self) -> int:
        """Return the bytes of a micro-batch's gradients besides the sum so far; 0 if they are added in place."""
        return self.share if self.stage == 2 and self.width == 4 else 0

    @property
    def reduction_copies(self) -> int:
        """Return the bytes of copies in the last reduction of a backward pass.

        Stage 3 has two copies of the bucket: one in rank order, and one to send. Stage 2 has copies of one rank's part.
        """
        if self.stage == 3:
            return 2 * self._bucket(4)
        several = self.stage == 2 and self.ranks > 1
        return (self.share if self.width == 4 else 3 * self.share // 2) if several else 0

    @property
    def step_temporaries(self) -> int:
        """Return the bytes of temporaries in the optimizer's step: a rank's concatenated gradients.

        Stage 1 reduces gradients only in the optimizer's step. With float32 passes the step needs the larger of the
        bucket and this rank's gradients (twice these with several ranks). With bfloat16 passes the step needs a float32
        copy of the bucket to send.
        Stage 2 with bfloat16 passes has no temporaries.
        """
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
    """Return the bytes of gathered weights and prefetch buffer in a ZeRO 3 pass; 0 at other stages or on one rank."""
    if stage < 3 or ranks == 1:
        return 0
    width = whole / max(count, 1)
    return int(width * (min(LIVE_PARAMETERS, count) + min(PREFETCHED, count)))
