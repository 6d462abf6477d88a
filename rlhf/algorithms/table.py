"""What the algorithms are: one row each. To add one, add its row and the pure function it names."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rlhf.algorithms import advantages
from rlhf.config import AlgorithmConfig


@dataclass(frozen=True)
class Algorithm:
    """An algorithm by its parts. `advantages(scores [samples], group_size, config)` returns one advantage per response."""

    advantages: Callable[[Tensor, int, AlgorithmConfig], Tensor]


ALGORITHMS = {
    "grpo": Algorithm(
        advantages=lambda s, n, config: advantages.grpo(s, n, norm_by_std=config.norm_adv_by_std_in_grpo)
    ),
}
