"""The named verifiers, on real reasoning-gym tasks and real math-verify processes."""

import json
import time
from dataclasses import replace

import pytest

from rlhf.config import RewardConfig
from rlhf.reward import RewardItem, build_reward
from rlhf.reward.verifiers import final_answer, only_compares

MATH_CASES = [
    ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
    ("so \\boxed{0.5}", "\\frac{1}{2}", 1.0),
    ("The answer is 1/2", "\\frac{1}{2}", 1.0),
    ("so $x = 3$", "3", 1.0),
    ("so \\boxed{(1,2)}", "(1,2)", 1.0),
    ("so \\boxed{3}", "thus 6 / 2 = 3\n#### 3", 1.0),
    ("so \\boxed{4}", ["3", "4"], 1.0),
    ("so \\boxed{4}", "3", 0.0),
    ("no idea", "3", 0.0),
    ("", "3", 0.0),
]


def gym_item(task: str, response: str | None = None, index: int = 0, **config) -> RewardItem:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, seed=5, size=index + 1, **config)[index]
    extra = {"question": entry["question"], "metadata": entry["metadata"], "config": config}
    answer = entry["answer"] if response is None else response
    return RewardItem(f"reasoning_gym/{task}", answer, entry["answer"], extra, [])


@pytest.fixture
def rewards():
    made = []

    def make(name, **settings):
        made.append(build_reward(RewardConfig(functions=[name], **settings)))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("  two\n words ", "two words"),
        ("3 + 4 = 7\n#### 7\nThanks", "7"),
        ("#### 6 no, #### 7", "7"),
        ("####", ""),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2} done", "2"),
        (r"\boxed{1} #### 2", "2"),
        (r"#### 2 \boxed{1}", "1"),
        (r"\boxed{un{closed}", "un{closed}"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_exact_match_normalises_space_but_not_case(rewards):
    reward = rewards("exact_match")
    items = [
        RewardItem("x", "I think\n#### New   York", "New York", {}, []),
        RewardItem("x", "new york", "New York", {}, []),
        RewardItem("x", "42", 42, {}, []),
        RewardItem("x", "b", ["a", "b"], {}, []),
        RewardItem("x", "", "a", {}, []),
    ]
    assert [result.score for result in reward.score(items)] == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_math_verify_agrees_with_the_cases(rewards):
    reward = rewards("math_verify")
    results = reward.score([RewardItem("math", response, gold, {}, []) for response, gold, _ in MATH_CASES])
    assert [result.score for result in results] == [score for *_, score in MATH_CASES]


def test_math_verify_is_killed_on_an_endless_expression(rewards):
    reward = rewards("math_verify", timeout_s=2.0, failed_score=-1.0, num_workers=1)
    hard, easy = reward.score(
        [RewardItem("m", r"\boxed{9^{9^{9^{9}}}}", "3", {}, []), RewardItem("m", "so $3$", "3", {}, [])]
    )
    assert (hard.score, hard.timeouts) == (-1.0, 1)
    assert (easy.score, easy.timeouts) == (1.0, 0)


def test_reasoning_gym_scores_like_the_library(rewards):
    reward = rewards("reasoning_gym")
    right = [gym_item("chain_sum", index=i, min_terms=2, max_terms=2) for i in range(5)]
    spaced = gym_item("chain_sum", " " + right[0].response + "\n", min_terms=2, max_terms=2)
    wrong = gym_item("chain_sum", "banana", min_terms=2, max_terms=2)
    results = reward.score([*right, spaced, wrong])
    assert [r.score for r in results[:-1]] == [1.0] * 6
    assert results[-1].score < 0.5


def test_reasoning_gym_counts_an_answer_that_the_library_cannot_read(rewards):
    reward = rewards("reasoning_gym")
    bad, good = reward.score([gym_item("prime_factorization", "no idea"), gym_item("prime_factorization")])
    assert (bad.score, bad.extra) == (0.0, {"unreadable": 1.0})
    assert (good.score, good.extra) == (1.0, {"unreadable": 0.0})


def test_tasks_that_evaluate_text_are_scored_in_a_process_that_can_be_killed(rewards):
    assert not only_compares("reasoning_gym/n_queens", {})
    assert only_compares("reasoning_gym/chain_sum", {})
    reward = rewards("reasoning_gym", timeout_s=2.0, num_workers=1)
    items = [gym_item("countdown", "9**9**9**9"), gym_item("chain_sum"), gym_item("countdown")]
    results = reward.score(items)
    assert [result.timeouts for result in results] == [1, 0, 0]
    assert [result.score for result in results] == [0.0, 1.0, 1.0]


def test_a_number_in_an_answer_takes_no_time_or_memory_of_the_rank(rewards):
    reward = rewards("reasoning_gym", timeout_s=2.0, num_workers=1, memory_gb=1.0)
    endless, huge, good = reward.score(
        [gym_item("coin_flip", "1e999999999"), gym_item("rubiks_cube", "R9999999999"), gym_item("coin_flip")]
    )
    assert (endless.score, endless.timeouts) == (0.0, 1)
    assert huge.score < 0.1
    assert (good.score, good.timeouts, good.failures) == (1.0, 0, 0)


@pytest.mark.parametrize(
    ("task", "endless"),
    [
        ("rush_hour", "A+99999999"),  # moves a car step by step
        ("propositional_logic", "∨".join("abcdefghijklmnopqrstu")),  # tries all values of the 21 variables
    ],
)
def test_a_task_that_computes_with_the_answer_has_a_deadline(rewards, task, endless):
    reward = rewards("reasoning_gym", timeout_s=2.0, num_workers=1)
    late, wrong = reward.score([gym_item(task, endless), gym_item(task, "no idea")])
    assert (late.score, late.timeouts) == (0.0, 1)
    assert wrong.timeouts == 0


def test_only_tasks_that_compare_texts_or_decimals_run_in_the_rank():
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import compute_decimal_reward

    in_rank = {task for task in DATASETS if task != "composite" and only_compares(f"reasoning_gym/{task}", {})}
    own = {task for task in in_rank if "score_answer" in vars(DATASETS[task][0])}
    assert own == {"chain_sum", "products"}
    assert len(in_rank) > 30
    for task in own:
        assert "compute_decimal_reward" in DATASETS[task][0].score_answer.__code__.co_names
    start = time.monotonic()
    for answer in ("1e999999999999", "9" * 100_000, "-1e-99999999", "." * 100_000):
        assert compute_decimal_reward(answer, "5") < 0.01
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("task", ["arc_agi", "rearc"])
def test_a_board_is_right_although_json_has_no_tuples(rewards, task):
    item = gym_item(task)
    item.extra_info["metadata"] = json.loads(json.dumps(item.extra_info["metadata"]))
    right, wrong = rewards("reasoning_gym").score([item, replace(item, response="0 0")])
    assert (right.score, wrong.score) == (1.0, 0.05)


def test_an_answer_that_ends_its_verifier_costs_the_sample_not_the_run(rewards):
    reward = rewards("reasoning_gym", failed_score=-1.0, num_workers=1)
    deadly, good = reward.score([gym_item("n_queens", "__import__('os')._exit(3)"), gym_item("n_queens")])
    assert (deadly.score, deadly.timeouts, deadly.failures) == (-1.0, 0, 1)
    assert (good.score, good.failures) == (1.0, 0)
