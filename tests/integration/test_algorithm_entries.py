"""Every entry of conf/algorithm and every recipe composes, passes the checks, and trains two small steps."""

import json
import math
from pathlib import Path

import pytest

from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.errors import EXIT_DONE
from rlhf.reward import check_reward
from tests.support.launching import TINY_POLICY, ranks, records
from tests.support.tiny_models import classifier

LIBRARY = Library.find(None)
SAME_BUT_FOR_A_FUNCTION = {"sapo", "pass_at_k", "clip_cov"}
"""Entries that differ from `grpo` only in one pure function, which tests/numerics covers."""
RECIPES, ALGORITHMS = LIBRARY.entries("recipes"), LIBRARY.entries("algorithm")


def two_steps(folder: Path, sums: Path, *overrides: str) -> list[dict]:
    """Run two steps with small batches, with two optimizer steps each. Return their metrics."""
    end = ranks(
        folder / "log",
        [
            *overrides,
            f"trainer.default_local_dir={folder}",
            "trainer.experiment_name=two_steps",
            "trainer.total_training_steps=2",
            "trainer.save_freq=0",
            "trainer.test_freq=0",
            "trainer.val_before_train=false",
            "trainer.device=cpu",
            "trainer.threads_per_rank=1",
            "data.train_batch_size=8",
            "actor.ppo_mini_batch_size=4",
            "rollout.n=4",
        ],
    )
    assert end.code == EXIT_DONE, end.output
    steps = [record for record in records(folder / "rlhf" / "two_steps") if "actor/pg_loss" in record]
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values() if isinstance(value, float))
    return steps


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SAME_BUT_FOR_A_FUNCTION else name for name in ALGORITHMS],
)
def test_an_algorithm_trains_two_steps(name, tmp_path, sums):
    steps = two_steps(tmp_path, sums, f"algorithm={name}")
    config = compose_config([f"algorithm={name}"], LIBRARY)
    assert ("critic/loss" in steps[0]) == (config.algorithm.adv_estimator == "gae")
    assert ("actor/kl_loss" in steps[0]) == config.actor.use_kl_loss
    assert ("reward/kl" in steps[0]) == config.algorithm.use_kl_in_reward
    assert ("reward/overlong" in steps[0]) == config.reward.overlong_buffer.enable


@pytest.mark.parametrize(
    "overrides",
    [["algorithm=grpo", "actor.kl_loss_coef=0"], ["algorithm=rloo", "algorithm.kl_ctrl.kl_coef=0"]],
    ids=["loss", "reward"],
)
def test_a_kl_without_weight_needs_no_reference(overrides, tmp_path, sums):
    steps = two_steps(tmp_path, sums, *overrides)
    assert not any("actor/ref_kl" in step for step in steps)


# Keep what a recipe is about. Replace its model, data and sizes by small ones for the CPU.
SMALL = [
    f"model.path={TINY_POLICY}",
    "data.max_prompt_length=64",
    "data.max_response_length=8",
    "backend.autocast=none",
]
OWN_DATA = ["data.train_files={sums}", "data.val_files=null"]
WITHOUT_VLLM = ["rollout=embedded", "rollout.tensor_model_parallel_size=1"]
DAPO = [
    *SMALL,
    *OWN_DATA,
    "data.gen_batch_size=12",
    "reward.overlong_buffer.len=2",
    "actor.optim.lr_warmup_steps=1",
]
SMALL_RECIPES = {
    "offline": [],
    "env_guess": [],
    "env_calculator": [],
    "agent_calculator": [],
    "agent_gsm8k_qwen_3b": [
        f"model.path={TINY_POLICY.parent / 'tiny_agent_policy'}",
        *SMALL[1:],
        *OWN_DATA,
        "data.prompt_key=prompt",
        "data.answer_key=answer",
        "env.announce_tools=false",
    ],
    "minimal": [*SMALL, "data.train_files={sums}"],
    "gsm8k_qwen_0.5b": [*SMALL, "data.train_files={sums}", "data.val_files=null", "data.prompt_key=prompt"],
    "gsm8k_qwen_7b_lora": [*SMALL, "data.train_files={sums}", "data.val_files=null", "data.prompt_key=prompt"],
    "gsm8k_qwen_7b_lora_24gb": [
        *SMALL,
        "data.train_files={sums}",
        "data.val_files=null",
        "data.prompt_key=prompt",
        *WITHOUT_VLLM,
    ],
    "gsm8k_gemma3_1b": [*SMALL, "data.train_files={sums}", "data.val_files=null", "data.prompt_key=prompt"],
    "math_qwen3_8b": [*SMALL, *OWN_DATA, "data.prompt_key=prompt", "data.answer_key=answer"],
    "helpful_llama3_8b": [*SMALL, *OWN_DATA, "reward_model.path={judge}", "trainer.critic_warmup=0"],
    "mbpp_qwen_7b": [*SMALL, "data.train_files={mbpp}", "data.val_files=null", "data.max_prompt_length=200"],
    "dapo_math": DAPO,
    "dapo_math_32b": [*DAPO, *WITHOUT_VLLM, "trainer.nnodes=1", "trainer.nproc=1"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory, sums) -> dict[str, Path]:
    """Data and models of the small recipes."""
    folder = tmp_path_factory.mktemp("files")
    problem = {"text": "Write a function f that adds one.", "test_setup_code": "", "test_list": ["assert f(1) == 2"]}
    (folder / "mbpp.jsonl").write_text(8 * f"{json.dumps(problem)}\n")
    classifier("llama", folder / "judge")
    return {"sums": sums, "mbpp": folder / "mbpp.jsonl", "judge": folder / "judge"}


def test_no_recipe_is_left_out():
    assert set(SMALL_RECIPES) == set(RECIPES)


@pytest.mark.parametrize("name", SMALL_RECIPES)
def test_a_recipe_trains_two_steps(name, tmp_path, sums, files):
    two_steps(tmp_path, sums, f"recipes={name}", *(override.format(**files) for override in SMALL_RECIPES[name]))


def test_dapo_warms_up_over_the_papers_twenty_rollout_steps():
    config = compose_config(["recipes=dapo_math"], LIBRARY)
    optim = config.actor.optim
    assert (optim.lr_warmup_steps, optim.lr_scheduler_interval) == (20, "training_step")
    # The data set has 17 thousand prompts. Dynamic sampling may use all prompts of a step's generations.
    drawn = config.data.gen_batch_size * config.algorithm.filter_groups.max_num_gen_batches
    assert config.trainer.total_epochs * 17_000 // drawn > 100


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_the_checks_as_it_is(name):
    to_be_set = {
        "minimal": ["model.path=org/name", "data.train_files=a.jsonl"],
        "gsm8k_qwen_7b_lora_24gb": WITHOUT_VLLM,
        "dapo_math_32b": WITHOUT_VLLM,
    }
    config = compose_config([f"recipes={name}", *to_be_set.get(name, [])], LIBRARY)
    validate(config, {})
    check_reward(config.reward, config.reward_model, without_functions=bool(config.env.classes))
