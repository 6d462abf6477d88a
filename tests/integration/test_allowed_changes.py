"""Every setting that `trainer.allow_config_change=true` lets through acts after a resume: the next step differs.

The settings come from the rules by which a resume compares, so a new setting without a case here fails. Each case
continues the run of its scenario from step 1 in this process, once unchanged and once with the change.
"""

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import events
from rlhf.assemble.run import build
from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.compose import compose_config
from rlhf.config.known_settings import SETTINGS
from rlhf.config.library import Library
from rlhf.errors import Preempted, UserError
from rlhf.loop import train
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.ranks.status import StatusWriter
from rlhf.ranks.stop import STOP_SIGNALS
from rlhf.reward.scores import RewardError
from rlhf.tracking.history import MACHINE_METRICS
from tests.support.checkpoints import world_of_one
from tests.support.launching import TINY_POLICY, question
from tests.support.sections import prepare

BASE = [
    "model=tiny",
    "trainer.total_training_steps=9",
    "trainer.save_freq=0",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.device=cpu",
    "checkpoint.async_save=false",
    "tracking.progress=plain",
    "data.train_batch_size=8",
    "data.max_prompt_length=40",
    "data.max_response_length=10",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_epochs=2",
    "actor.optim.lr=2e-3",
    "actor.optim.lr_scheduler_type=linear",
    "actor.entropy_coeff=0.01",
]
FILES = ["data.train_files={folder}/sums.jsonl", "reward=exact_match"]
KL = ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.1"]
SCENARIOS: dict[str, list[str]] = {
    "grpo": [*FILES, *KL],
    "epochs": [*FILES, "trainer.total_training_steps=null"],
    "problems": [
        "data=reasoning_gym",
        "reward=reasoning_gym",
        "data.reasoning_gym.train_size=60",
        "data.reasoning_gym.val_size=20",
        "data.reasoning_gym.config={{min_terms: 2, max_terms: 2, min_digits: 2, max_digits: 2}}",
    ],
    "ppo": [
        *FILES,
        "algorithm=ppo",
        "algorithm.normalize_reward=running",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "critic.ppo_epochs=2",
        "critic.optim.lr=2e-3",
        "critic.optim.lr_scheduler_type=linear",
    ],
    "dapo": [
        *FILES,
        "algorithm.filter_groups.enable=true",
        "data.gen_batch_size=12",
        "reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.len=8",
    ],
    "two generations": [
        *FILES,
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=1",
        "rollout.temperature=0.3",
    ],
    "own reward": ["data.train_files={folder}/sums.jsonl", "reward.functions=[{folder}/rewards.py:short]"],
    "failing reward": [
        "data.train_files={folder}/sums.jsonl",
        "reward.functions=[{folder}/rewards.py:fails]",
        "reward.on_error=score",
        "reward.num_workers=1",
    ],
    "moving reference": [*FILES, *KL, "ref.update_freq=1", "ref.alpha=0.5"],
    "refused": [*FILES, "guards.max_loss=1e-9"],
    "fixed length": [*FILES, "actor.loss_agg_mode=seq-mean-token-sum-norm"],
    "styled": [*FILES, "model.chat_template={folder}/styled.jinja"],
    "own rows": [*FILES, "data.custom_cls.path={folder}/rows.py", "data.custom_cls.name=swapped"],
    "lora": [*FILES, *KL, "model.lora.enabled=true", "model.lora.rank=8"],
    "entropy below": [*FILES, "actor.entropy_ctrl.type=adaptive", "actor.entropy_ctrl.target_entropy=9"],
    "entropy above": [*FILES, "actor.entropy_ctrl.type=adaptive", "actor.entropy_ctrl.target_entropy=0"],
    "clip cov": [
        *FILES,
        "actor.policy_loss.loss_mode=clip_cov",
        "actor.policy_loss.clip_cov_ratio=0.2",
        "actor.policy_loss.clip_cov_lb=0.01",
    ],
    "kl cov": [*FILES, "actor.policy_loss.loss_mode=kl_cov", "actor.policy_loss.kl_cov_ratio=0.2"],
    "pass at k": [*FILES, "algorithm.adv_estimator=pass_at_k"],
    "sapo": [*FILES, "actor.policy_loss.loss_mode=sapo"],
    "corrected": [*FILES, "algorithm.rollout_correction.rollout_is=token"],
    "rejecting": [
        *FILES,
        "rollout.dtype=bfloat16",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=1.001",
    ],
}


@dataclass(frozen=True)
class Case:
    """A change of settings on top of a scenario. `rejected` is part of the error if the change is impossible. `beside`
    is a further change, which the compared run has, too."""

    change: str | list[str]
    scenario: str = "grpo"
    rejected: str | None = None
    beside: str | None = None

    @property
    def overrides(self) -> list[str]:
        return [self.change] if isinstance(self.change, str) else self.change


def grpo(*keys_and_values: str) -> dict[str, Case]:
    return {text.partition("=")[0]: Case(text) for text in keys_and_values}


def of(scenario: str, *keys_and_values: str) -> dict[str, Case]:
    return {text.partition("=")[0]: Case(text, scenario) for text in keys_and_values}


OTHER_ADAPTERS = "do not fit the architecture of model.path"
CASES: dict[str, Case] = {
    **grpo(
        "trainer.seed=2",
        "trainer.total_training_steps=3",
        "model.chat_template={folder}/template.jinja",
        "data.train_files={folder}/others.jsonl",
        "data.system_prompt='1 2'",
        "data.prompt_key=other_prompt",
        "data.answer_key=other_answer",
        "data.train_batch_size=4",
        "data.max_prompt_length=60",
        "data.max_response_length=3",
        "data.overlong_prompts=left",
        "data.shuffle=false",
        "data.train_max_samples=11",
        "rollout.n=2",
        "rollout.temperature=0.5",
        "rollout.top_p=0.5",
        "rollout.top_k=2",
        "rollout.min_p=0.5",
        "rollout.repetition_penalty=1.5",
        "rollout.stop=['1']",
        "rollout.ignore_eos=true",
        "rollout.dtype=bfloat16",
        "reward.functions=[math_verify]",
        "reward.weights=[2.0]",
        "algorithm.adv_estimator=rloo",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "algorithm.mask_truncated_responses=true",
        "actor.ppo_mini_batch_size=8",
        "actor.ppo_epochs=1",
        "actor.shuffle=true",
        "actor.policy_loss.loss_mode=gspo",
        "actor.clip_ratio_low=1e-5",
        "actor.clip_ratio_high=1e-5",
        "actor.clip_ratio_c=1.00001",
        "actor.loss_agg_mode=seq-mean-token-mean",
        "actor.use_kl_loss=false",
        "actor.kl_loss_coef=0.5",
        "actor.kl_loss_type=k1",
        "actor.use_bias_correction_kl=true",
        "actor.entropy_coeff=0.2",
        "actor.grad_clip=1e-3",
        "actor.optim.lr=1e-3",
        "actor.optim.betas=[0.5,0.9]",
        "actor.optim.eps=1e-2",
        "actor.optim.weight_decay=0.5",
        "actor.optim.decay_norm_and_bias=true",
        "actor.optim.lr_scheduler_type=cosine",
        "actor.optim.lr_scheduler_interval=training_step",
        "actor.optim.lr_warmup_steps=9",
        "actor.optim.min_lr_ratio=0.5",
        "guards.max_loss=1e-9",
        "guards.max_kl=1e-12",
        "backend.autocast=bfloat16",
        "ref.fsdp_config.model_dtype=bfloat16",
    ),
    **of("epochs", "trainer.total_epochs=2"),
    **of(
        "problems",
        "data.reasoning_gym.config={{min_terms: 3, max_terms: 3}}",
        "data.reasoning_gym.train_size=50",
        "data.reasoning_gym.val_size=3000",
    ),
    "data.reasoning_gym.task": Case(
        ["data.reasoning_gym.task=basic_arithmetic", "data.reasoning_gym.config={{}}"], "problems"
    ),
    **of(
        "ppo",
        "algorithm.normalize_reward=batch",
        "algorithm.reward_clip_range=[0.5,0.6]",
        "trainer.critic_warmup=4",
        "algorithm.gamma=0.7",
        "algorithm.lam=0.7",
        "algorithm.use_kl_in_reward=false",
        "algorithm.kl_penalty=k3",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "algorithm.kl_ctrl.target_kl=1.0",
        "algorithm.kl_ctrl.horizon=1000",
        "critic.ppo_epochs=3",
        "critic.cliprange_value=1e-4",
        "critic.loss_agg_mode=seq-mean-token-mean",
        "critic.grad_clip=1e-3",
        "critic.optim.lr=1e-3",
        "critic.optim.betas=[0.5,0.9]",
        "critic.optim.eps=1e-2",
        "critic.optim.weight_decay=0.5",
        "critic.optim.decay_norm_and_bias=true",
        "critic.optim.lr_scheduler_type=cosine",
        "critic.optim.lr_scheduler_interval=training_step",
        "critic.optim.lr_warmup_steps=9",
        "critic.optim.min_lr_ratio=0.5",
    ),
    "algorithm.kl_ctrl.type": Case("algorithm.kl_ctrl.type=fixed", "ppo"),
    "critic.enable": Case("critic.enable=true", "grpo", "has no critic"),
    **of(
        "dapo",
        "data.gen_batch_size=16",
        "reward.overlong_buffer.enable=false",
        "reward.overlong_buffer.len=3",
        "reward.overlong_buffer.penalty_factor=3",
        "algorithm.filter_groups.enable=false",
        "algorithm.filter_groups.metric=seq_reward",
        "rollout.max_staleness=0",
    ),
    **of(
        "two generations",
        "algorithm.filter_groups.max_num_gen_batches=4",
        "algorithm.filter_groups.on_limit=stop",
    ),
    **of("own reward", "reward.timeout_s=0.2", "reward.kwargs={{odd: 4}}"),
    **of("failing reward", "reward.on_error=stop", "reward.failed_score=-2", "reward.pass_env=[PATH_OF_A_TEST]"),
    **of("moving reference", "ref.update_freq=3", "ref.alpha=0.9"),
    **of("refused", "guards.action=stop", "guards.max_events=1"),
    **of("fixed length", "actor.loss_scale_factor=3"),
    **of("styled", "data.apply_chat_template_kwargs={{short: true}}"),
    **of(
        "entropy below",
        "actor.entropy_ctrl.type=fixed",
        "actor.entropy_ctrl.target_entropy=0",
        "actor.entropy_ctrl.delta=0.1",
        "actor.entropy_ctrl.max_coeff=0.01",
    ),
    **of("entropy above", "actor.entropy_ctrl.min_coeff=0.005"),
    **of(
        "clip cov",
        "actor.policy_loss.clip_cov_ratio=0.9",
        "actor.policy_loss.clip_cov_lb=-9",
        "actor.policy_loss.clip_cov_ub=0.02",
    ),
    **of("kl cov", "actor.policy_loss.kl_cov_ratio=0.9", "actor.policy_loss.ppo_kl_coef=5"),
    **of("pass at k", "algorithm.pass_at_k=3"),
    **of("sapo", "actor.tau_pos=9", "actor.tau_neg=9"),
    **of(
        "corrected",
        "algorithm.rollout_correction.rollout_is_threshold=0.5",
        "algorithm.rollout_correction.rollout_is_threshold_lower=1.0",
    ),
    **of(
        "rejecting",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=1.01",
        "algorithm.rollout_correction.rollout_rs_threshold_lower=0.5",
    ),
    "rollout.sampling_mask": Case("rollout.sampling_mask=true", beside="rollout.top_k=2"),
    "algorithm.rollout_correction.rollout_is": Case("algorithm.rollout_correction.rollout_is=token"),
    "data.last_turn_as_answer": Case(["data.last_turn_as_answer=true", "data.prompt_key=chat"]),
    **of("own rows", "data.custom_cls.path={folder}/other_rows.py", "data.custom_cls.name=shortened"),
    **of("lora", "model.lora.alpha=4", "model.lora.dropout=0.5", "model.lora.base_dtype=bfloat16"),
    **of("lora", "model.lora.use_rslora=true"),
    "model.lora.enabled": Case("model.lora.enabled=true", "grpo", OTHER_ADAPTERS),
    "model.lora.rank": Case("model.lora.rank=4", "lora", OTHER_ADAPTERS),
    "model.lora.target_modules": Case("model.lora.target_modules=[q_proj]", "lora", OTHER_ADAPTERS),
    "model.lora.exclude_modules": Case("model.lora.exclude_modules=[q_proj]", "lora", OTHER_ADAPTERS),
    "model.lora.use_dora": Case("model.lora.use_dora=true", "lora", OTHER_ADAPTERS),
    "guards.max_reward_drop": Case("guards.max_reward_drop=1e-9", beside="reward.weights=[0.01]"),
}
ENGINE = "builds vLLM, which has nothing in a checkpoint: tests/integration/test_vllm_engine.py"
SANDBOX = "sandbox of reward processes, which has nothing in a checkpoint: tests of the sandbox"
EPISODES = "acts in episodes, which have nothing in a checkpoint: tests/integration/test_episodes.py"
ELSEWHERE: dict[str, str] = {
    "trainer.deterministic": "set in the process before there is anything to restore: rlhf/ranks/collectives.py",
    "trainer.tf32": "set in the process before there is anything to restore, and of no effect on a CPU",
    "model.trust_remote_code": "decides what is loaded before there is anything to restore",
    "model.attn_implementation": "another kernel for the same numbers, in the model before it is filled",
    "rollout.name": ENGINE,
    "rollout.tensor_model_parallel_size": ENGINE,
    "rollout.enforce_eager": ENGINE,
    "rollout.structured_outputs": ENGINE,
    "rollout.async_steps": ENGINE,
    "rollout.engine_kwargs.vllm": ENGINE,
    "rollout.lora": ENGINE,
    **dict.fromkeys(
        (
            "env.classes",
            "env.kwargs",
            "env.command",
            "env.template",
            "env.announce_tools",
            "env.max_turns",
            "env.max_rows",
            "env.max_invalid_calls",
            "env.timeout_s",
            "env.retries",
            "env.max_failed",
            "env.reward_weight",
            "env.process",
        ),
        EPISODES,
    ),
    "env.pass_env": SANDBOX,
    "env.network": SANDBOX,
    "env.writable": SANDBOX,
    "env.memory_gb": SANDBOX,
    "reward.network": SANDBOX,
    "reward.writable": SANDBOX,
    "reward.memory_gb": SANDBOX,
    "reward_model.max_length": "acts on a model that no checkpoint stores: tests/integration/test_reward_model.py",
    "reward_model.fsdp_config.model_dtype": "acts on a model in no checkpoint: tests/numerics/test_reference.py",
}
ENDS_THE_RUN = {"reward.on_error", "guards.action", "guards.max_events", "algorithm.filter_groups.on_limit"}
REWARDS = """
import os, time

def short(data_source, solution_str, ground_truth, extra_info, odd=0):
    time.sleep(0.4 if len(solution_str) > 2 else 0)
    return odd * (len(solution_str) % 2) - float(len(solution_str))

def fails(data_source, solution_str, ground_truth, extra_info):
    if "PATH_OF_A_TEST" not in os.environ and len(solution_str) % 2:
        raise ValueError("odd")
    return float(len(solution_str))
"""


ROWS = """
def swapped(row):
    return {**row, "prompt": row["other_prompt"]}

def shortened(row):
    return {**row, "prompt": row["other_prompt"][:-1]}
"""


def test_every_setting_that_allow_config_change_permits_has_a_case():
    let_through = {key for key, setting in SETTINGS.items() if setting.metadata["resume"] == "trajectory"}
    assert CASES.keys() | ELSEWHERE.keys() == let_through
    assert CASES.keys() & ELSEWHERE.keys() == set()
    assert {case.scenario for case in CASES.values()} == set(SCENARIOS)


class Runs:
    """Runs of two steps. Each scenario makes its first step once, and its second step without a change once, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, dict[str, Any]] = {}
        rows = []
        for i in range(40):
            a, b = 10 + (7 * i) % 83, 10 + (11 * i) % 79
            prompt = question(a, b) + " and take your time with it, please, as long as you want to" * (i % 10 == 0)
            chat = [{"role": "user", "content": question(b, a)}, {"role": "assistant", "content": "8"}]
            row = {"prompt": prompt, "answer": str(a + b), "other_prompt": question(b, b), "other_answer": "7"}
            rows.append({**row, "chat": chat})
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[20:]))
        (folder / "rewards.py").write_text(REWARDS)
        (folder / "rows.py").write_text(ROWS)
        (folder / "other_rows.py").write_text(ROWS.replace("other_prompt", "prompt"))
        template = (TINY_POLICY / "chat_template.jinja").read_text()
        (folder / "template.jinja").write_text("1 2 3 " + template)
        (folder / "styled.jinja").write_text("{% if short %}1 2 {% endif %}" + template)

    def as_saved(self, scenario: str) -> dict[str, Any]:
        if scenario not in self._known:
            self._known[scenario] = self.step(scenario, [], "as_saved")
        return self._known[scenario]

    def step(self, scenario: str, overrides: list[str], name: str) -> dict[str, Any]:
        """Run the second step with `overrides`. Return its results, or the error of a rejected start."""
        start = self.folder / scenario / "rlhf" / "run"
        if not start.exists():
            self._train(scenario, [], scenario)
        home = self.folder / f"{scenario} {name}"
        shutil.copytree(start, home / "rlhf" / "run")
        try:
            self._train(scenario, [*overrides, "trainer.allow_config_change=true"], home.name)
        except (UserError, RewardError) as error:
            return {"error": str(error)}
        return figures(home / "rlhf" / "run")

    def _train(self, scenario: str, overrides: list[str], name: str) -> None:
        """Train one more step, and save."""
        texts = [*BASE, *SCENARIOS[scenario], *overrides]
        # A user's file is named and hashed by its path.
        texts = [text.format(folder=self.folder) if "{" in text else text for text in texts]
        config = compose_config(
            ["recipes=null", *texts, f"trainer.default_local_dir={self.folder / name}", "trainer.experiment_name=run"],
            Library.find(None),
        )
        if not config.run_dir.exists():
            prepare(config)
        coordinator = Coordinator(GlooTransport())
        components = build(config, torch.device("cpu"), coordinator, StatusWriter(config.run_dir, 0), ProgressDisplay())
        components.stop_requested = lambda: True
        try:
            with pytest.raises(Preempted):
                train(components)
        finally:
            components.run_log.close()
            components.reward.close()
            components.engine.close()


def figures(run_dir: Path) -> dict[str, Any]:
    """Return all results of step 2 except times."""
    record = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["step"] == 2
    checkpoint = run_dir / "global_step_2"
    driver = json.loads((checkpoint / "driver_state.json").read_text())
    hashes = {n: entry["xxh3_128"] for n, entry in read_manifest(checkpoint).files.items() if n.endswith("tensors")}
    return {
        "metrics": {name: value for name, value in record.items() if not name.startswith(MACHINE_METRICS)},
        "weights": {name: hash_ for name, hash_ in hashes.items() if "/model/" in name},
        "kl_coef": driver["kl_control"]["kl_coef"],  # the coefficient for the next step
        "entropy": driver.get("entropy_control"),
        "rewards": driver.get("reward_scaling"),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory, own_process: None) -> Any:
    folder = tmp_path_factory.mktemp("changes")
    with world_of_one(folder):
        yield Runs(folder)


@pytest.fixture(scope="module")
def own_process() -> Any:
    """Set the variables that a run needs, and restore the listeners and signal handlers that it changes."""

    listeners, handlers = list(events._listeners), {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("PATH_OF_A_TEST", "1")
        yield
    events._listeners[:] = listeners
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_step_is_the_same_without_a_change(runs, scenario):
    """If the step differed without a change, the other tests could not fail."""
    again, as_saved = runs.step(scenario, [], "again"), runs.as_saved(scenario)
    for part in as_saved:
        assert again[part] == as_saved[part], part


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
def test_a_change_acts_in_the_first_step_after_a_resume(runs, key):
    case = CASES[key]
    beside = [] if case.beside is None else [case.beside]
    as_saved = runs.step(case.scenario, beside, f"beside {key}") if beside else runs.as_saved(case.scenario)
    assert "error" not in as_saved, as_saved
    changed = runs.step(case.scenario, [*beside, *case.overrides], key)
    if case.rejected is not None:
        assert case.rejected in changed["error"]
        return
    if "error" in changed:
        assert key in ("reward.on_error", "guards.action", "guards.max_events", "algorithm.filter_groups.on_limit"), (
            changed
        )
    assert changed != as_saved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "name", "setting"),
    [("own reward", "rewards.py", "reward.functions"), ("styled", "styled.jinja", "model.chat_template")],
)
def test_a_file_that_changed_under_its_name_is_refused_until_it_is_allowed(runs, scenario, name, setting):
    as_saved, path = runs.as_saved(scenario), runs.folder / name
    before = path.read_text()
    path.write_text(
        before.replace("- float(len(solution_str))", "+ 1.0").replace("{% if short %}", "1 2 3 {% if short %}")
    )
    try:
        home = runs.folder / f"{scenario} other file"
        shutil.copytree(runs.folder / scenario / "rlhf" / "run", home / "rlhf" / "run")
        with pytest.raises(UserError, match=f"{setting}=.* holds other files than when"):
            runs._train(scenario, [], home.name)
        assert runs.step(scenario, [], "other file allowed") != as_saved
    finally:
        path.write_text(before)
