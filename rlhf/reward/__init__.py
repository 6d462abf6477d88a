"""Scores samples with named verifiers, the user's functions and a reward model, and sums the scores.

Imports no torch: every reward process imports this module.
"""

from rlhf.config.schema.reward import REWARD_MODEL, VERIFIERS, RewardConfig
from rlhf.config.user_functions import split_spec
from rlhf.reward.failures import FailurePolicy, Timeouts, merge_timeouts
from rlhf.reward.inprocess import ExactMatch, ReasoningGym
from rlhf.reward.pool import ProcessPool
from rlhf.reward.scores import RewardError, RewardItem, RewardResult, Score, Scorer
from rlhf.reward.settings import SETTING, WantedColumns, check_functions, check_reward, label_of, weights_of
from rlhf.reward.verifiers import Reader, answer_reader
from rlhf.reward.weighted import Reward, Term


def build_reward(config: RewardConfig, reward_model: Scorer | None = None) -> Reward:
    """Build the weighted sum of `reward.functions`; `reward_model` scores the entry of that name.

    Processes start at the first `score`. Raises UserError for settings that `check_reward` rejects.
    """
    # Allow an empty list here: `check_reward` rejects it unless environments give rewards.
    check_functions(config, without_functions=True)
    return Reward(
        [_term(f, w, config, reward_model) for f, w in zip(config.functions, weights_of(config), strict=True)]
    )


def _term(function: str, weight: float, config: RewardConfig, reward_model: Scorer | None) -> Term:
    policy = FailurePolicy(function, config)
    scorer: Scorer
    if function == REWARD_MODEL:
        assert reward_model is not None
        scorer = reward_model
    elif function == "exact_match":
        scorer = ExactMatch()
    elif function in VERIFIERS:
        # A user must fix a function that kills its process. But a response can kill a named verifier (memory,
        # recursion, eval). If this ended the run, the same sample would end the run after every restart.
        pool = ProcessPool(function, config, policy, forgive_deaths=True)
        scorer = ReasoningGym(pool) if function == "reasoning_gym" else pool
    else:
        path, name = split_spec(SETTING, function)
        scorer = ProcessPool(f"{path}:{name}", config, policy)
    return Term(label_of(function), weight, scorer, policy)
