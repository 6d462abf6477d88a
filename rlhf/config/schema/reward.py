"""Section `reward`: the reward functions and their failures."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting

REWARD_MODEL = "reward_model"
"""Name of the reward function that runs the model of the section `reward_model`."""
VERIFIERS = ("reasoning_gym", "math_verify", "exact_match", "code_tests")
"""Named reward functions that check a response with its row's answer."""


@dataclass
class OverlongBufferConfig:
    enable: bool = setting(False)
    """Penalize responses close to the length limit (DAPO's soft over-long penalty)."""
    len: int = setting(64, ge=1)
    """Tokens before `data.max_response_length` over which the penalty grows."""
    penalty_factor: float = setting(1.0, gt=0)
    """Penalty at the limit."""


@dataclass
class RewardConfig:
    functions: list[str] = setting(["reasoning_gym"])
    """Rewards to sum: `reasoning_gym`, `math_verify`, `exact_match`, `code_tests`, `reward_model`, or
    `path/to/file.py:name`, a function in verl's or TRL's form. A response is right if the first function's score is at
    least 1. If a function returns `acc`, the response is right if `acc` is 1."""
    kwargs: dict[str, Any] = setting({})
    """Extra arguments for functions in files; each function gets those it accepts (verl's `reward_kwargs`)."""
    weights: list[float] | None = setting(None)
    """One weight per entry of `functions`; null means 1 each."""
    timeout_s: float = setting(10.0, gt=0)
    """Time limit of a reward process in seconds per sample; a batched call has this time for each of its samples. A
    process that takes longer is killed, and its samples get `failed_score`."""
    on_error: str = setting("stop", choices=("stop", "score"))
    """What to do if a function raises or returns no number on a sample, if your own function's process dies twice on a
    sample, or if all samples of a step fail or time out: `stop` the run, or `score` these samples with
    `failed_score`."""
    failed_score: float = setting(0.0)
    """Score, before its weight, of a sample whose reward failed or timed out."""
    num_workers: int = setting(2, ge=1, resume="harmless")
    """Reward processes per rank and function. They run `math_verify`, `code_tests`, functions in files and most
    tasks of `reasoning_gym`."""
    pass_env: list[str] = setting([])
    """Environment variables to pass to reward processes, such as an API key. Paths, language, thread counts and devices
    are always passed."""
    network: bool = setting(False)
    """Give reward processes, and generated code that they run, access to the network and to this machine's sockets."""
    writable: list[str] = setting([])
    """Folders that reward processes may write to, besides their own temporary folder (HOME and TMPDIR)."""
    memory_gb: float | None = setting(8.0, gt=0)
    """GiB that a reward process, and each of its child processes, may allocate; null sets no limit. A sample that needs
    more fails."""
    overlong_buffer: OverlongBufferConfig = setting(OverlongBufferConfig)
