from dataclasses import dataclass

from rlhf.config.fields import setting


@dataclass
class AlgorithmConfig:
    adv_estimator: str = setting("grpo", choices=("grpo",))
    """How rewards become advantages; a name of `rlhf/algorithms/table.py`."""
    norm_adv_by_std_in_grpo: bool = setting(True)
    """Divide group advantages by the group's standard deviation; false is Dr.GRPO."""
