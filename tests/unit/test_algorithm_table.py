import re
from pathlib import Path

import pytest
import torch
import yaml

from rlhf.algorithms import advantages, losses
from rlhf.algorithms.advantages import EstimatorInput
from rlhf.algorithms.lookup import load_estimator, load_policy_loss
from rlhf.compose import compose_config
from rlhf.config import AlgorithmConfig, Config
from rlhf.config.algorithm_table import ALGORITHMS, ESTIMATORS, POLICY_LOSSES
from rlhf.config.derived import needs_critic, needs_greedy_baseline, needs_reference
from rlhf.config.known_settings import SETTINGS
from rlhf.config.library import Library
from rlhf.config.rules.algorithm_rules import algorithm_problems
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from tests.support.configurations import make

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Library.find(None)
ENTRIES = LIBRARY.entries("algorithm")


def values(config: Config, keys) -> dict:
    return {key: SETTINGS[key].value(config) for key in keys}


def leaves(section: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in section.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def problems(**changes) -> list[str]:
    return list(algorithm_problems(make(**changes)))


def test_table_and_entries_have_the_same_names():
    assert set(ENTRIES) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_entry_has_exactly_the_settings_of_its_table_row(name):
    assert leaves(yaml.safe_load(ENTRIES[name].read_text())) == ALGORITHMS[name].settings()


def test_all_algorithms_set_the_same_settings():
    assert {frozenset(row.settings()) for row in ALGORITHMS.values()} == {frozenset(ALGORITHMS["ppo"].settings())}


@pytest.mark.parametrize("path", LIBRARY.entries("recipes").values(), ids=LIBRARY.entries("recipes"))
def test_no_recipe_sets_what_an_algorithm_sets(path):
    assert not leaves(yaml.safe_load(path.read_text())).keys() & ALGORITHMS["ppo"].settings().keys()


def test_an_algorithm_wins_over_the_groups_before_it():
    for name, row in ALGORITHMS.items():
        config = compose_config([f"algorithm={name}"], LIBRARY)
        assert values(config, row.settings()) == row.settings()
        validate(config, {})


def test_dapo_fills_its_batches_as_published():
    filters = compose_config(["algorithm=dapo"], LIBRARY).algorithm.filter_groups
    assert (filters.metric, filters.max_num_gen_batches) == ("acc", 10)


def test_the_page_has_a_row_for_each_algorithm():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    lines = page[page.index("| Entry |") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    found = {row[0].split("`")[0]: tuple(row[1:5]) for row in rows}
    assert found == {name: (a.adv_estimator, a.loss_mode, a.loss_agg_mode, a.kl) for name, a in ALGORITHMS.items()}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_named_estimators_are_the_functions_of_that_name(name):
    assert load_estimator(name) is getattr(advantages, name)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_named_losses_are_the_functions_of_that_name(name):
    assert load_policy_loss(name) is getattr(losses, name)


@pytest.mark.parametrize(
    ("changes", "critic"),
    [
        ({}, False),
        ({"algorithm__adv_estimator": "gae"}, True),
        ({"algorithm__adv_estimator": "mine.py:f"}, False),
        ({"algorithm__adv_estimator": "mine.py:f", "critic__enable": True}, True),
        ({"algorithm__adv_estimator": "gae", "critic__enable": False}, False),
    ],
)
def test_needs_critic_follows_estimator_and_settings(changes, critic):
    config = make(**changes)
    assert needs_critic(config.algorithm, config.critic) is critic


@pytest.mark.parametrize(
    ("changes", "reference"),
    [
        ({}, False),
        ({"actor__use_kl_loss": True}, True),
        ({"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.0}, False),
        ({"algorithm__use_kl_in_reward": True}, True),
        ({"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__kl_coef": 0.0}, False),
    ],
)
def test_needs_reference_follows_kl_and_reference_settings(changes, reference):
    config = make(**changes)
    assert needs_reference(config.actor, config.algorithm) is reference


def test_only_remax_needs_a_greedy_baseline():
    assert [n for n in ESTIMATORS if needs_greedy_baseline(AlgorithmConfig(adv_estimator=n))] == ["remax"]


REJECTED: list[tuple[dict, str]] = [
    (
        {"algorithm__adv_estimator": "grop"},
        "algorithm.adv_estimator=grop: must be one of gae, grpo, rloo, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, remax, pass_at_k, "
        "or path/to/file.py:function. Did you mean grpo?",
    ),
    (
        {"algorithm__adv_estimator": "ppo"},
        "algorithm.adv_estimator=ppo: ppo is a whole algorithm; write algorithm=ppo.",
    ),
    ({"actor__policy_loss__loss_mode": "dapo"}, "dapo is a whole algorithm; write algorithm=dapo."),
    (
        {"actor__policy_loss__loss_mode": "gpso"},
        "actor.policy_loss.loss_mode=gpso: must be one of vanilla, gspo, cispo, sapo, clip_cov, kl_cov, or "
        "path/to/file.py:function. Did you mean gspo?",
    ),
    ({"algorithm__adv_estimator": "nowhere.py:f"}, "algorithm.adv_estimator=nowhere.py:f: no file "),
    ({"rollout__n": 1}, "rollout.n=1: grpo compares the samples of one prompt; set rollout.n to 2 or more."),
    ({"algorithm__adv_estimator": "rloo", "rollout__n": 1}, "rollout.n=1: rloo compares"),
    (
        {"algorithm__adv_estimator": "reinforce_plus_plus_baseline", "rollout__n": 1},
        "rollout.n=1: reinforce_plus_plus_baseline compares",
    ),
    ({"algorithm__adv_estimator": "remax", "rollout__top_k": 1}, "rollout.top_k=1: remax compares"),
    ({"algorithm__adv_estimator": "remax", "rollout__min_p": 1.0}, "rollout.min_p=1: remax compares"),
    (
        {"algorithm__mask_truncated_responses": True, "rollout__ignore_eos": True},
        "algorithm.mask_truncated_responses=true: with rollout.ignore_eos=true",
    ),
    ({"algorithm__adv_estimator": "gae", "critic__enable": False}, "critic.enable=false: gae needs values"),
    ({"critic__enable": True}, "critic.enable=true: grpo computes no returns to train a critic on"),
    ({"trainer__critic_warmup": 2}, "trainer.critic_warmup=2: grpo trains no critic; set trainer.critic_warmup=0."),
    (
        {"actor__tau_neg": 2.0},
        "actor.tau_neg=2.0: has effect only with actor.policy_loss.loss_mode=sapo (it is vanilla); set "
        "actor.policy_loss.loss_mode=sapo, or actor.tau_neg=1.05.",
    ),
    ({"algorithm__pass_at_k": 4}, "algorithm.pass_at_k=4: has effect only with algorithm.adv_estimator=pass_at_k"),
    (
        {"algorithm__adv_estimator": "pass_at_k", "rollout__n": 4, "algorithm__pass_at_k": 4},
        "algorithm.pass_at_k=4: must be less than rollout.n=4, or the best sample is always the same; set "
        "algorithm.pass_at_k=2, or a larger rollout.n.",
    ),
    ({"ref__update_freq": 10}, "ref.update_freq=10: the run has no KL term, so it has no reference policy"),
    (
        {"actor__use_kl_loss": True, "ref__update_freq": 3, "ref__fsdp_config__model_dtype": "bfloat16"},
        "ref.fsdp_config.model_dtype=bfloat16: would round away the small updates",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REJECTED, ids=[str(changes) for changes, _ in REJECTED])
def test_invalid_algorithm_settings_are_rejected(changes, message):
    (line,) = problems(**changes)
    assert message in line


ACCEPTED: dict[str, dict] = {
    "one sample for a baseline of its own": {"algorithm__adv_estimator": "remax", "rollout__n": 1},
    "one sample per prompt over the batch": {"algorithm__adv_estimator": "reinforce_plus_plus", "rollout__n": 1},
    "a critic first": {"algorithm__adv_estimator": "gae", "rollout__n": 1, "trainer__critic_warmup": 5},
    "a moving reference": {"actor__use_kl_loss": True, "ref__update_freq": 3},
    "a moving reference in the reward": {"algorithm__use_kl_in_reward": True, "ref__update_freq": 3},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_valid_algorithm_settings_are_accepted(changes):
    assert problems(**changes) == []


def test_all_problems_of_the_settings_are_reported_together():
    assert len(problems(algorithm__adv_estimator="x", actor__policy_loss__loss_mode="y", ref__update_freq=1)) == 3


FILE = """
import no_such_module

def two(inputs, config): ...
def five(log_probs, old_log_probs, advantages, mask, config): ...
"""


def test_files_are_checked_without_being_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert problems(algorithm__adv_estimator=f"{file}:two", actor__policy_loss__loss_mode=f"{file}:five") == []
    lines = problems(algorithm__adv_estimator=f"{file}:five", actor__policy_loss__loss_mode=f"{file}:two")
    assert [line.partition(f"={file}:")[0] for line in lines] == [
        "algorithm.adv_estimator",
        "actor.policy_loss.loss_mode",
    ]
    assert "is called with 2 arguments: (inputs, config)" in lines[0]
    assert "the function takes (inputs, config), but is called with 5 arguments: (log_probs, " in lines[1]


OUTCOME = EstimatorInput(
    token_rewards=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
    mask=torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]),
    group_size=2,
)
ESTIMATOR_FILE = """
import torch
from helper_of_mine import TWO
from rlhf.algorithms.advantages import Estimate

def good(inputs, config):
    return Estimate(torch.full_like(inputs.token_rewards, TWO * config.gamma, dtype=torch.float64))

def tensor(inputs, config):
    return inputs.token_rewards

def shape(inputs, config):
    return Estimate(inputs.scores)

def whole_numbers(inputs, config):
    return Estimate(inputs.mask.long())

def not_finite(inputs, config):
    return Estimate(inputs.token_rewards / 0)

def not_finite_outside(inputs, config):
    return Estimate(torch.where(inputs.mask.bool(), 1.0, torch.nan))

def raises(inputs, config):
    return Estimate(inputs.mask.nothing_of_the_kind)

def out_of_memory(inputs, config):
    raise torch.OutOfMemoryError("on the device")
"""


@pytest.fixture
def estimators(tmp_path) -> Path:
    (tmp_path / "helper_of_mine.py").write_text("TWO = 2\n")
    (tmp_path / "estimators.py").write_text(ESTIMATOR_FILE)
    return tmp_path / "estimators.py"


def test_a_custom_estimator_is_loaded_from_its_file(estimators):
    estimate = load_estimator(f"{estimators}:good")(OUTCOME, Config().algorithm)
    assert torch.equal(estimate.advantages, 2 * OUTCOME.mask)
    assert estimate.returns is None


def test_values_outside_the_mask_do_not_affect_a_custom_estimator(estimators):
    estimate = load_estimator(f"{estimators}:not_finite_outside")(OUTCOME, Config().algorithm)
    assert torch.equal(estimate.advantages, OUTCOME.mask)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensor", "returned torch.float32[2, 3]. Return rlhf.algorithms.advantages.Estimate(advantages)."),
        (
            "shape",
            "returned advantages of torch.float64[2]. Return floating-point numbers of the mask's shape, [2, 3].",
        ),
        ("whole_numbers", "returned advantages of torch.int64[2, 3]."),
        ("not_finite", "returned advantages that are not finite."),
    ],
)
def test_an_invalid_result_of_a_custom_estimator_is_an_error(estimators, name, message):
    estimator = load_estimator(f"{estimators}:{name}")
    with pytest.raises(UserError, match=re.escape(f"algorithm.adv_estimator={estimators}:{name} {message}")):
        estimator(OUTCOME, Config().algorithm)


def test_an_exception_in_a_custom_estimator_is_reported_with_one_traceback(estimators):
    with pytest.raises(UserError) as caught:
        load_estimator(f"{estimators}:raises")(OUTCOME, Config().algorithm)
    message = str(caught.value)
    assert message.startswith(f"algorithm.adv_estimator={estimators}:raises raised an error, which ends the run.")
    assert message.count("Traceback") == message.count("nothing_of_the_kind'") == 1
    assert "inputs.mask.nothing_of_the_kind" in message
    assert "rlhf/algorithms/user.py" not in message
    # An error that another attempt may avoid, such as out of memory, is left to the supervisor.
    with pytest.raises(torch.OutOfMemoryError):
        load_estimator(f"{estimators}:out_of_memory")(OUTCOME, Config().algorithm)


def test_a_critic_needs_returns(estimators):
    estimator = load_estimator(f"{estimators}:good")
    with pytest.raises(UserError, match="returned no returns, but the critic needs"):
        estimator(
            EstimatorInput(OUTCOME.token_rewards, OUTCOME.mask, 2, values=OUTCOME.token_rewards), Config().algorithm
        )


LOSS_FILE = """
from rlhf.algorithms.losses import PolicyLoss

def good(log_probs, old_log_probs, advantages, mask, config):
    return PolicyLoss(-advantages * log_probs * mask, {"distance": (log_probs - old_log_probs).detach()})

def pair(log_probs, old_log_probs, advantages, mask, config):
    return -advantages * log_probs, {}

def summed(log_probs, old_log_probs, advantages, mask, config):
    return PolicyLoss((-advantages * log_probs).sum(), {})

def figure(log_probs, old_log_probs, advantages, mask, config):
    return PolicyLoss(-advantages * log_probs, {"mean": 0.5})

def detached(log_probs, old_log_probs, advantages, mask, config):
    return PolicyLoss(-advantages * log_probs.detach(), {})

def raises(log_probs, old_log_probs, advantages, mask, config):
    return log_probs @ mask
"""


def test_a_custom_policy_loss_is_loaded_and_its_result_checked(tmp_path):
    file = tmp_path / "my_losses.py"
    file.write_text(LOSS_FILE)
    ones, log_probs = torch.ones(2, 3), torch.zeros(2, 3, requires_grad=True)
    arguments = (log_probs, log_probs.detach(), ones, ones, Config().actor)
    assert set(load_policy_loss(f"{file}:good")(*arguments).metrics) == {"distance"}
    for name, message in {
        "pair": "returned type tuple. Return rlhf.algorithms.losses.PolicyLoss(losses, metrics).",
        "summed": "returned losses of torch.float32[].",
        "figure": "returned mean of type float.",
        "detached": "returned losses without a gradient.",
        "raises": "raised an error, which ends the run. Fix the function.\nTraceback",
    }.items():
        with pytest.raises(UserError, match=re.escape(f"actor.policy_loss.loss_mode={file}:{name} {message}")):
            load_policy_loss(f"{file}:{name}")(*arguments)
