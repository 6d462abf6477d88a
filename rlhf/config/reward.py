from dataclasses import dataclass

from rlhf.config.fields import setting


@dataclass
class RewardConfig:
    name: str = setting("reasoning_gym", choices=("reasoning_gym", "math_verify", "exact_match"))
    """The verifier, unless `function` is set."""
    function: str | None = setting(None)
    """`path/to/file.py:name`, called as name(data_source=, solution_str=, ground_truth=, extra_info=) in a process of its own; it
    returns a number, or a dict with `score` and further numbers to log."""
    timeout_s: float = setting(10.0, gt=0)
    """Seconds for one sample in a reward process; past them the process is killed, the sample scores `timeout_score` and is counted."""
    timeout_score: float = setting(0.0)
    num_workers: int = setting(2, ge=1, resume="harmless")
    """Reward processes per rank, for `math_verify` and `function`."""
