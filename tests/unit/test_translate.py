"""Configurations of verl, TRL and OpenRLHF as recipes (python -m rlhf.translate)."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.cli.translate import main, recipe_of
from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.known_settings import SETTINGS, setting_of
from rlhf.config.library import Library
from rlhf.config.names.other_trainers import other_trainers
from rlhf.config.rules.validate import validate
from rlhf.config.translation.foreign_file import of_arguments, read_settings, trainer_of
from rlhf.config.translation.shell_script import commands_of
from rlhf.config.translation.to_recipe import defaults_of, translate
from rlhf.errors import UserError

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"

# The configurations under our names. Values that follow from several foreign settings are computed by hand.
EXPECTED: dict[str, dict[str, Any]] = {
    "verl_grpo.sh": {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 1024,
        "actor.ppo_mini_batch_size": 256,
        "actor.ppo_max_token_len_per_gpu": 16 * (512 + 1024),
        "actor.kl_loss_type": "k3",
        "actor.optim.lr": 1e-6,
        "actor.optim.lr_scheduler_interval": "training_step",
        "rollout.name": "vllm",
        "rollout.gpu_memory_utilization": 0.6,
        "trainer.save_freq": 0,
        "trainer.logger": ["wandb"],
        "trainer.nproc": 8,
    },
    "verl_dapo.sh": {
        "data.train_files": "/home/someone/verl/data/dapo-math-17k.parquet",
        "data.gen_batch_size": 1536,
        "data.overlong_prompts": "left",
        "data.max_response_length": 20480,
        "actor.ppo_max_token_len_per_gpu": 22528,
        "actor.clip_ratio_high": 0.28,
        "actor.use_kl_loss": False,
        "actor.optim.lr_warmup_steps": 10,
        "algorithm.filter_groups.enable": True,
        "reward.overlong_buffer.len": 4096,
        "rollout.val_kwargs.temperature": 1.0,
        "trainer.experiment_name": "DAPO-7B",
        "model.path": "models/Qwen2.5-Math-7B",
    },
    "verl_lora.sh": {"model.lora.enabled": True, "model.lora.rank": 64, "model.lora.alpha": 32, "rollout.n": 5},
    "verl_ppo.yaml": {
        "trainer.logger": ["mlflow"],
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "k1",
        "algorithm.kl_ctrl.type": "adaptive",
        "actor.clip_ratio_low": 0.1,
        "actor.clip_ratio_high": 0.1,
        "actor.optim.lr_scheduler_type": "cosine",
        "actor.use_kl_loss": False,
        "critic.path": "deepseek-ai/deepseek-llm-7b-chat",
        "critic.optim.lr": 1e-5,
        "checkpoint.contents": ["model", "optimizer", "extra", "hf_model"],
        "reward.functions": ["my_reward.py:score_gsm8k"],
        "data.overlong_prompts": "filter",
    },
    "trl_vllm.yaml": {
        "data.train_batch_size": 8 * 4 * 4 // 8,
        "actor.ppo_mini_batch_size": 16,
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.28,
        "actor.kl_loss_coef": 0.001,
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.rollout_correction.rollout_is": "sequence",
        "backend.autocast": "bfloat16",
        "data.train_files": "trl-lib/DeepMath-103K@train",
        "reward.functions": ["math_verify"],
        "rollout.name": "vllm",
        "trainer.seed": 3,
        "trainer.test_freq": 50,
        "trainer.total_epochs": 3,
    },
    "trl_gspo.sh": {
        "actor.policy_loss.loss_mode": "gspo",
        "actor.clip_ratio_low": 3e-4,
        "actor.clip_ratio_high": 4e-4,
        "actor.use_kl_loss": False,
        "data.train_batch_size": 2 * 16 // 8,
        "actor.ppo_mini_batch_size": 2 * 8 // 8,
        "data.train_files": "open-r1/DAPO-Math-17k-Processed:en@train",
        "model.enable_gradient_checkpointing": False,
        "rollout.name": "embedded",
        "trainer.total_training_steps": 250,
        "trainer.log_samples": 1,
    },
    "trl_drgrpo.json": {
        "actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "rollout.servers.urls": ["http://node7:8000"],
        "ref.update_freq": 64,
        "ref.alpha": 0.6,
        "trainer.save_freq": 0,
    },
    "openrlhf_ppo.sh": {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.95,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.target_kl": 6.0,
        "algorithm.normalize_reward": "running",
        "actor.ppo_mini_batch_size": 128,
        "data.max_prompt_length": 1024,
        "critic.optim.lr": 9e-6,
        "backend.zero_stage": 3,
        "reward.functions": ["reward_model"],
        "rollout.servers.count": 2,
        "trainer.logger": ["wandb"],
    },
    "openrlhf_dapo.sh": {
        "actor.clip_ratio_high": 0.27,
        "actor.kl_loss_type": "k3",
        "algorithm.filter_groups.enable": True,
        "reward.functions": ["/openrlhf/examples/python/reward_func.py:reward_func"],
        "rollout.tensor_model_parallel_size": 2,
        "trainer.save_freq": 20,
    },
    "openrlhf_reinforce.sh": {
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.use_kl_in_reward": False,
        "algorithm.gamma": 0.99,
        "actor.grad_clip": 0.5,
        "actor.optim.min_lr_ratio": 0.1,
        "actor.ppo_max_token_len_per_gpu": 16384,
        "data.answer_key": "answer",
        "rollout.async_steps": 1,
        "trainer.deterministic": True,
        "trainer.seed": 7,
    },
}

LOST = {
    "verl_grpo.sh": ["custom_reward_function.path"],
    "verl_dapo.sh": ["custom_reward_function.path"],
    "verl_ppo.yaml": ["rollout.name=sglang", "lr_warmup_steps_ratio=0.1", "hybrid_engine"],
    "trl_vllm.yaml": ["think_format_reward", "push_to_hub"],
    "trl_gspo.sh": ["warmup_ratio=0.05", "num_processes", "reward_funcs"],
    "trl_drgrpo.json": ["top_entropy_quantile", "reward_funcs"],
    "openrlhf_dapo.sh": ["dynamic_filtering_range", "ckpt_path"],
    "openrlhf_reinforce.sh": ["remote_url=http://localhost:5000/get_reward"],
}


VERL = "actor_rollout_ref.model.path: x\n"


def _bomb(line: str, reference: str, between: str) -> str:
    """Return nine settings x0, x1, ... of which each contains ten references to the one before."""
    lines = [f"x0: {line.format(0, 'aaaaaaaaaa')}"]
    lines += [f"x{i}: {line.format(i, between.join([reference.format(i - 1)] * 10))}" for i in range(1, 9)]
    return VERL + "\n".join(lines) + "\n"


def translated(text: str, folder: Path, name: str = "theirs.yaml") -> str:
    (folder / name).write_text(text)
    return recipe_of(folder / name)


def composed(text: str, folder: Path) -> Config:
    (folder / "recipes").mkdir()
    (folder / "recipes" / "foreign.yaml").write_text(text)
    return compose_config(["recipes=foreign"], Library.find(folder))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_translated_configuration_has_the_same_values_and_lists_the_rest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    text = recipe_of(FOREIGN / name)
    assert "does not compose" not in text
    config = composed(text, tmp_path)
    found = {key: SETTINGS[key].value(config) for key in EXPECTED[name]}
    assert found == EXPECTED[name]
    comments = text.partition("# Not translated:")[2]
    assert [lost for lost in LOST.get(name, []) if lost not in comments] == []


def test_every_file_is_expected() -> None:
    assert {path.name for path in FOREIGN.iterdir()} == set(EXPECTED)


def test_names_in_the_tables_and_defaults_exist_here() -> None:
    for trainer in ("verl", "trl", "openrlhf"):
        names = other_trainers().names[trainer]
        groups = {"rollout", "recipes"}
        assert [key for key in names.values() if setting_of(key) is None and key not in groups] == []
        assert translate(trainer, defaults_of(trainer)).unknown == {}


def test_a_script_is_read_without_running_it(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    script = f"""
    export N=4   # devices
    SIZE=$((N * (2 + 1)))
    NAME="${{UNSET:-a b}}"
    OTHER=$(touch {marker})
    python3 -m verl.trainer.main_ppo \\
        a.size=$SIZE a.name="$NAME" a.home=$HOME/x +a.extra=1e-6 a.list=[1,2] "$@"
    """
    words = commands_of(script)[-1]
    found = of_arguments(words)
    assert found["a.size"] == 12
    assert found["a.name"] == "a b"
    assert found["a.home"] == "${oc.env:HOME}/x"
    assert found["a.extra"] == 1e-6
    assert found["a.list"] == [1, 2]
    assert not marker.exists()


@pytest.mark.parametrize("section", ["custom_reward_function", "reward.custom_reward_function"])
def test_arguments_of_the_reward_function_are_kept(section: str, tmp_path: Path) -> None:
    given = f"{section}.reward_kwargs.bonus: 0.5\n{section}.reward_kwargs.of.a: [1, 2]\n{section}.path: mine.py\n"
    text = translated(VERL + given, tmp_path)
    assert "reward_kwargs" not in text
    assert composed(text, tmp_path).reward.kwargs == {"bonus": 0.5, "of": {"a": [1, 2]}}


@pytest.mark.parametrize("given", ["reward_model.model.path: judge", "reward.reward_model.model_path: judge"])
def test_verls_reward_model_scores_alone(given: str, tmp_path: Path) -> None:
    section = given.partition(".model")[0]
    text = translated(f"{VERL}{section}.enable: true\n{given}\n", tmp_path)
    assert "verifier" not in text
    config = composed(text, tmp_path)
    assert config.reward.functions == ["reward_model"]
    assert config.reward_model.path == "judge"


def test_a_function_beside_verls_reward_model_scores_alone_and_the_model_is_listed(tmp_path: Path) -> None:
    model = "reward_model.enable: true\nreward_model.model.path: judge\nreward_model.rollout.name: vllm\n"
    text = translated(f"{VERL}{model}custom_reward_function.path: mine.py\n", tmp_path)
    config = composed(text, tmp_path)
    assert config.reward.functions == ["mine.py:compute_score"]
    assert config.reward_model.path is None
    comments = text.partition("# Not translated:")[2]
    assert "reward_model.model.path=judge: " in comments
    assert "reward.functions=[reward_model]" in comments


def test_a_recipe_from_trl_with_vllm_also_runs_with_the_embedded_engine(tmp_path: Path) -> None:
    text = recipe_of(FOREIGN / "trl_vllm.yaml")
    composed(text, tmp_path)
    validate(compose_config(["recipes=foreign", "rollout=embedded"], Library.find(tmp_path)))


def test_sequence_parallelism_has_no_equivalent(tmp_path: Path) -> None:
    name = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    text = translated(f"{VERL}{name}: 8\n", tmp_path)
    assert "Training has no sequence parallelism" in text
    assert "ulysses" not in text.partition("# Not needed here")[2]
    assert "ulysses" not in translated(f"{VERL}{name}: 1\n", tmp_path)


def test_two_names_of_one_setting_are_reported(tmp_path: Path) -> None:
    recipe = translate("openrlhf", {"save_path": "a", "ckpt_path": "b"})
    assert recipe.settings["trainer.default_local_dir"] == "a"
    assert any("ckpt_path=b" in line for line in recipe.lost)


def test_a_wrong_value_is_listed_and_not_written() -> None:
    recipe = translate("verl", {"actor.ppo_epochs": "many", "rollout.top_p": 7})
    assert "actor.ppo_epochs" not in recipe.settings
    assert "rollout.top_p" not in recipe.settings
    assert any(line.startswith("actor.ppo_epochs=many") for line in recipe.lost)
    assert any(line.startswith("rollout.top_p=7") for line in recipe.lost)


def test_a_python_script_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.py"
    path.write_text("args = GRPOConfig(num_generations=8)\n")
    assert main([str(path)]) == 2
    assert f"{path}: is a Python script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "there is no such file"),
        ("", "has no settings"),
        ("a: [1", "not valid YAML"),
        ("- 1\n- 2\n", "must have settings at the top"),
        ("unheard_of: 1\n", "--trainer"),
        ("num_generations: many\n", "num_generations=many: must be a number"),
        ("num_generations: 0\n", "num_generations=0: must be at least 1"),
        ("num_generations: 8\nreward_funcs: 5\n", "reward_funcs=5: must be a list of strings"),
        ("num_generations: 8\nloss_type: [x]\n", "loss_type=['x']: must be a string"),
        ("num_generations: 8\nreport_to: 5\n", "report_to=5: must be a list"),
        ("pretrain: x\nrollout_batch_size: 0\n", "rollout_batch_size=0: must be at least 1"),
        ("actor_rollout_ref.model.path: x\ntrainer.logger: 5\n", "trainer.logger=5: must be a list"),
        ("[" * 3000, "not valid YAML"),
        (b"\xff\xfe\x00", "is not a text file"),
        (f"{VERL}data: &a {{x: *a}}\n", "an alias"),
        (f"{VERL}data: &a [*a]\n", "an alias"),
        (f"{VERL}data: 2001-99-01\n", "month must be in 1..12"),
        (f"{VERL}data: {'9' * 5000}\n", "4300 digits"),
        (f"{VERL}data: [0x{'f' * 5000}]\n", "data has a number with too many digits"),
        (f"{VERL}data: !!int ''\n", "a value cannot be read"),
        (f"{VERL}data: !!timestamp x\n", "a value cannot be read"),
        (_bomb("&x{0} [{1}]", "*x{0}", ", "), "an alias"),
        (_bomb("'{1}'", "${{x{0}}}", ""), "the interpolations expand to over"),
        (_bomb("['{1}']", "${{x{0}.0}}", ""), "the interpolations expand to over"),
        (f"{VERL}long: {'a' * 600_000}\nx: ['${{long}}', '${{long}}']\n", "the interpolations expand to over"),
        (VERL + "".join(f"x{i}: '${{x{i + 1}}}'\n" for i in range(3000)), "nested too deeply"),
    ],
)
def test_a_mistake_is_one_message(
    content: str | bytes | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.yaml"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main([str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert problem in printed.err


def test_a_trainer_is_recognised_by_names_of_its_own() -> None:
    here = Path("x.yaml")
    assert trainer_of(here, {"actor_rollout_ref.model.path": 1}) == "verl"
    assert trainer_of(here, {"num_generations": 8}) == "trl"
    assert trainer_of(here, {"algo.kl.init_coef": 0}) == "openrlhf"


def test_null_is_the_trainers_default() -> None:
    recipe = translate("trl", {"num_generations": 4, "per_device_train_batch_size": None})
    assert recipe.settings["data.train_batch_size"] == 8 // 4


def test_variables_that_double_do_not_fill_the_memory() -> None:
    with pytest.raises(UserError, match="characters"):
        commands_of("A=xy\n" + 'A="$A$A"\n' * 40)


def test_interpolations_of_the_environment_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "of-the-environment")
    kwargs = """reward:
  kwargs:
    token: ${oc.env:MY_TOKEN}
    header: a ${oc.env:MY_TOKEN,none} b
    headers: ["Authorization: Bearer ${oc.env:MY_TOKEN}"]
    other: ${..kwargs.token}
    decoded: ${oc.decode:${oc.env:MY_TOKEN}}
    steps: ${trainer.total_training_steps}
    chosen: ${oc.select:absent.one,${trainer.total_training_steps}}
    itself: ${.itself}
    elsewhere: ${oc.select:absent.one}
trainer: {total_training_steps: 7}
"""
    text = translated(f"{VERL}{kwargs}notes: ${{oc.env:MY_TOKEN}}\n", tmp_path)
    assert "of-the-environment" not in text
    assert "notes=${oc.env:MY_TOKEN}" in text
    assert yaml.safe_load(text)["reward"]["kwargs"] == {
        "token": "${oc.env:MY_TOKEN}",
        "header": "a ${oc.env:MY_TOKEN,none} b",
        "headers": ["Authorization: Bearer ${oc.env:MY_TOKEN}"],
        "other": "${oc.env:MY_TOKEN}",
        "decoded": "${oc.decode:${oc.env:MY_TOKEN}}",
        "steps": 7,
        "chosen": 7,
        "itself": "${.itself}",
        "elsewhere": "${oc.select:absent.one}",
    }


def test_references_in_a_list_are_resolved(tmp_path: Path) -> None:
    text = """data:
  root: /d
  files: ['${data.root}/a.parquet', "${..root}/b.parquet", '${.0}', '${oc.env:HOME}/c', '${data}', 3, '']
  nested: [{path: '${data.root}/e', same: '${.path}'}, ['${data.root}']]
  same: ${data.files}
"""
    (tmp_path / "theirs.yaml").write_text(text)
    settings = read_settings(tmp_path / "theirs.yaml")
    files = ["/d/a.parquet", "/d/b.parquet", "/d/a.parquet", "${oc.env:HOME}/c", "${data}", 3, ""]
    assert settings["data.files"] == settings["data.same"] == files
    assert settings["data.nested"] == [{"path": "/d/e", "same": "/d/e"}, ["/d"]]


@pytest.mark.parametrize(
    "line",
    [
        "hub_token: hf_SEKRETSEKRETSEKRETSEKRET",
        "wandb_api_key: SEKRET",
        "hf_token: SEKRET",
        "openai_api_key_2: SEKRET",
        "pwd: SEKRET",
        "secrets: {inner: SEKRET}",
        "headers: ['X-Api-Key: SEKRET', 'Authorization: Bearer SEKRET']",
        "tracking.alerts.webhook: http://h/SEKRET",
        "tracking.alerts.command: [curl, --token, SEKRET]",
        "reward.kwargs.api_key: SEKRET",
        "reward.kwargs.api_key: 'SEKRET ${oc.env:MY_TOKEN}'",
        "rollout.servers.urls: ['http://u:SEKRET@h']",
        "reward.remote_url: http://u:SEKRET@h/x?token=SEKRET",
        "'http://u:SEKRET@h': 1",
    ],
)
def test_a_recipe_has_no_secret_of_the_file(line: str, tmp_path: Path) -> None:
    for trainer in ("pretrain: x\n", VERL):
        text = translated(f"{trainer}{line}\n", tmp_path)
        assert "SEKRET" not in text
        assert "REDACTED" in text or "secrets.*" in text


def test_numbers_of_tokens_stay_visible(tmp_path: Path) -> None:
    assert "most_tokens=512" in translated(f"{VERL}most_tokens: 512\n", tmp_path)


@pytest.mark.parametrize("end", ["\\n", "\\r", "\\x85", "\\u2028"])
def test_a_line_break_does_not_end_a_comment(end: str, tmp_path: Path) -> None:
    live = f"x{end}tracking: {{alerts: {{command: [sh, -c, id]}}}} #"
    lines = [f'? "{live}"\n: 1', f'y: "{live}"', f'trainer.logger: ["{live}"]', f'data.truncation: "{live}"']
    lines += [f'? "reward.kwargs.{live}"\n: 1', f'trust_remote_code: "{live}"', f'model.trust_remote_code: "{live}"']
    for line in lines:
        text = translated(f"{VERL}{line}\n", tmp_path)
        assert "tracking" not in yaml.safe_load(text)
        assert "command" in text
    odd = translated(VERL, tmp_path, "x\ntracking: {alerts: {command: [id]}} #.yaml")
    assert "tracking" not in yaml.safe_load(odd)


def test_settings_that_run_code_are_left_out(tmp_path: Path) -> None:
    settings = {
        "model.trust_remote_code": True,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.trust_remote_code": True,
        "rollout.engine_kwargs.vllm.worker_extension_cls": "evil.Worker",
        "trainer.callbacks": ["evil.py:f"],
        "tracking.alerts.command": ["sh", "-c", "id"],
        "env.command": "id",
        "env.classes": ["evil.py:E"],
        "reward.functions": ["evil.py:f"],
        "reward.network": True,
        "data.custom_cls.path": "evil.py",
        "actor.policy_loss.loss_mode": "evil.py:f",
    }
    text = translated(f"{VERL}{yaml.safe_dump(settings)}custom_reward_function.path: mine.py\n", tmp_path)
    head = text.partition("defaults:")[0]
    for name, value in settings.items():
        assert f"{name.removeprefix('actor_rollout_ref.')}={value}" in head
    assert "reward.functions=['mine.py:compute_score']" in head
    live = yaml.safe_load(text)
    assert live["reward"] == {"functions": ["mine.py:compute_score"]}
    assert not {"tracking", "env"} & live.keys()
    assert "evil" not in str(live)
    assert "trust_remote_code" not in str(live)
    trl = translated("num_generations: 8\ntrust_remote_code: true\ncallbacks: [evil.py:f]\n", tmp_path)
    assert "trust_remote_code=True, callbacks=['evil.py:f']" in trl.partition("defaults:")[0]
    assert "evil" not in str(yaml.safe_load(trl))
    assert "trust_remote_code" not in str(yaml.safe_load(trl))
    off = translated(f"{VERL}model.trust_remote_code: false\n", tmp_path)
    assert "Left out" not in off


def test_values_of_a_script_with_odd_dates_and_numbers(tmp_path: Path) -> None:
    script = f"python -m verl.trainer.main_ppo {VERL.replace(': ', '=').strip()} a.b=2001-99-01 a.c={'9' * 5000}\n"
    [words] = commands_of(script)
    found = of_arguments(words)
    assert (found["a.b"], found["a.c"]) == ("2001-99-01", "9" * 5000)
    assert "model:" in translated(script, tmp_path, "theirs.sh")


def test_a_setting_inside_of_another_setting_is_listed(tmp_path: Path) -> None:
    text = translated(f"{VERL}reward.kwargs.a: 1\nreward.kwargs.a.b: 2\n", tmp_path)
    assert yaml.safe_load(text)["reward"]["kwargs"] == {"a": 1}
    assert "reward.kwargs.a.b=2: another name has already set reward.kwargs.a=1" in text
