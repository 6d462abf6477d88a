"""Verifiable rewards, by name or by a function of the user's. Loads no torch: every reward process imports it."""

from rlhf.config.reward import RewardConfig
from rlhf.reward.function import check_reward, split_spec
from rlhf.reward.inprocess import ExactMatchReward, ReasoningGymReward
from rlhf.reward.pool import ProcessPool
from rlhf.reward.types import Reward, RewardError, RewardItem, RewardResult


def build_reward(config: RewardConfig) -> Reward:
    """The reward that `reward.function`, or else `reward.name`, names. Processes start at the first `score`.

    Raises UserError for a `reward.function` that leads nowhere.
    """
    if config.function is not None:
        check_reward(config)
        path, name = split_spec(config.function)
        return ProcessPool(f"{path}:{name}", config)
    if config.name == "exact_match":
        return ExactMatchReward()
    pool = ProcessPool(config.name, config)
    return pool if config.name == "math_verify" else ReasoningGymReward(pool)


__all__ = ["Reward", "RewardError", "RewardItem", "RewardResult", "build_reward", "check_reward"]
