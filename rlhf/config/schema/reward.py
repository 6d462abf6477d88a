"""Section `reward`: the reward functions and their failures."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting

REWARD_MODEL = "reward_model"
"""The reward function that is a model (section `reward_model`)."""
VERIFIERS = ("reasoning_gym", "math_verify", "exact_match")
"""The named functions that compare a response with its row's answer."""


@dataclass
class OverlongBufferConfig:
    enable: bool = setting(False)
    """Punish responses that come near the limit (DAPO's soft over-long punishment)."""
    len: int = setting(64, ge=1)
    """Tokens before `data.max_response_length` over which the punishment grows."""
    penalty_factor: float = setting(1.0, gt=0)
    """The punishment at the limit."""


@dataclass
class RewardConfig:
    functions: list[str] = setting(["reasoning_gym"])
    """The rewards, added up: `reasoning_gym`, `math_verify`, `exact_match`, `reward_model`, or `path/to/file.py:name`,
    a function as verl's or TRL's files have it, called in a process of its own with the arguments that it names. The
    first one decides what counts as right (a score of at least 1)."""
    kwargs: dict[str, Any] = setting({})
    """Further arguments for the functions of files, each for those that take it (verl's `reward_kwargs`)."""
    weights: list[float] | None = setting(None)
    """One weight for each of `functions`; null weighs all 1."""
    timeout_s: float = setting(10.0, gt=0)
    """Seconds for one sample in a reward process, and for each of those of a call that judges several; past them the
    process is killed, the sample or the samples score `failed_score` and are counted."""
    on_error: str = setting("stop", choices=("stop", "score"))
    """A function that raises, returns no number or dies twice on a sample: end the run, or give the sample
    `failed_score` and count it."""
    failed_score: float = setting(0.0)
    """Score of a sample on which a reward failed or ran out of time, before its weight."""
    num_workers: int = setting(2, ge=1, resume="harmless")
    """Reward processes per rank and function, for `math_verify` and functions of a file."""
    pass_env: list[str] = setting([])
    """Environment variables that reward processes get besides those that a program needs to run (paths, language,
    numbers of threads, devices): name those that your function needs, such as an API key."""
    network: bool = setting(False)
    """Let reward processes use the network and sockets of this machine; text of the policy's that they run can as
    well."""
    writable: list[str] = setting([])
    """Folders that reward processes write to besides the one of their own (HOME and TMPDIR), which is emptied."""
    memory_gb: float | None = setting(8.0, gt=0)
    """GiB that a reward process, and each that it starts, may allocate; a sample that needs more has failed. null does
    not limit it."""
    overlong_buffer: OverlongBufferConfig = setting(OverlongBufferConfig)
