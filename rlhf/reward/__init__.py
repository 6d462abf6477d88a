"""Rewards: named verifiers, functions of the user's and a reward model, added up.

Loads no torch: every reward process imports it.
"""

from rlhf.config.schema.reward import REWARD_MODEL, RewardConfig
from rlhf.config.user_functions import split_spec
from rlhf.reward.failures import FailurePolicy, Timeouts, merge_timeouts
from rlhf.reward.function import SETTING, WantedColumns
from rlhf.reward.inprocess import ExactMatch, ReasoningGym
from rlhf.reward.pool import ProcessPool
from rlhf.reward.scores import RewardError, RewardItem, RewardResult, Score, Scorer
from rlhf.reward.settings import check_functions, check_reward, label_of, weights_of
from rlhf.reward.verifiers import Reader, answer_reader
from rlhf.reward.weighted import Reward, Term


def build_reward(config: RewardConfig, reward_model: Scorer | None = None) -> Reward:
    """The sum of `reward.functions`; `reward_model` is the one of that name. Processes start at the first `score`.

    Raises UserError for settings that `check_reward` refuses.
    """
    check_functions(config)
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
    elif function in ("math_verify", "reasoning_gym"):
        # If a user's function kills its process, the user must fix the function. A named verifier dies of the policy's
        # text (memory, recursion, eval). If that ended the run, the same sample would end it after every restart.
        pool = ProcessPool(function, config, policy, forgive_deaths=True)
        scorer = pool if function == "math_verify" else ReasoningGym(pool)
    else:
        path, name = split_spec(SETTING, function)
        scorer = ProcessPool(f"{path}:{name}", config, policy)
    return Term(label_of(function), weight, scorer, policy)
