"""python -m rlhf.translate loses no setting: each is in the recipe or a comment, with the other trainer's defaults."""

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.names.other_trainers import other_trainers
from rlhf.config.translation import to_recipe
from rlhf.config.translation.foreign_file import read_settings
from rlhf.config.translation.recipe import Recipe, Theirs
from rlhf.config.translation.to_recipe import defaults_of, translate
from rlhf.errors import UserError

# Settings beside the tested one. Conversions use other names with a critic, a vLLM engine or evaluations than without.
SITUATIONS: dict[str, list[dict[str, Any]]] = {
    "verl": [{}, {"algorithm.adv_estimator": "grpo", "actor.use_dynamic_bsz": True, "model.lora_rank": 4}],
    "trl": [{}, {"use_peft": True, "use_vllm": True, "eval_strategy": "steps", "sync_ref_model": True, "beta": 0.1}],
    "openrlhf": [{}, {"advantage_estimator": "group_norm", "vllm.num_engines": 2, "ds.lora.rank": 4}],
}
# Other spellings of defaults.
DEFAULTS = [("bf16", True), ("scale_rewards", True), ("use_unbiased_kl", True), ("vllm_importance_sampling_cap", 3)]
VALUES = (True, 3, "text")


def accounted(recipe: Recipe, without: Recipe) -> bool:
    """Return whether `recipe` has a setting or a comment that the recipe `without` one of the settings lacks."""
    settings = (recipe.settings, recipe.groups) != (without.settings, without.groups)
    return settings or bool(
        set(recipe.lost) - set(without.lost)
        or recipe.unknown.keys() - without.unknown.keys()
        or set(recipe.needless) - set(without.needless)
    )


class Recorded(Theirs):
    """Also records the names that the conversions read."""

    names: set[str]

    def take(self, *names: str) -> Any:
        self.names.update(names)
        return super().take(*names)

    def drop(self, *names: str) -> list[str]:
        self.names.update(names)
        return super().drop(*names)


@pytest.mark.parametrize("trainer", SITUATIONS)
def test_every_known_setting_is_in_the_recipe_or_in_a_comment(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_recipe, "Theirs", Recorded)
    monkeypatch.setattr(Recorded, "names", set(), raising=False)
    plain = [translate(trainer, situation) for situation in SITUATIONS[trainer]]
    tables = other_trainers()
    names = sorted({*tables.names[trainer], *tables.remarks, *defaults_of(trainer), *Recorded.names})
    assert len(names) > 250
    lost = []
    for situation, without in zip(SITUATIONS[trainer], plain, strict=True):
        # Only conversions depend on the situation.
        for name in sorted(Recorded.names - situation.keys()) if situation else names:
            for value in VALUES:
                # True == 1: the value does nothing in verl
                if defaults_of(trainer).get(name) == value or (name, value) in DEFAULTS or "ulysses" in name:
                    continue
                try:
                    recipe = translate(trainer, situation | {name: value})
                except UserError:
                    continue  # the command names the wrong value and stops
                if not accounted(recipe, without):
                    lost.append((name, value))
    assert lost == []


def test_zero_is_a_value() -> None:
    assert translate("trl", {"some_new_coefficient": 0}).unknown == {"some_new_coefficient": 0}


def test_a_value_of_the_file_comes_before_a_default_and_a_second_name_is_reported() -> None:
    recipe = translate("openrlhf", {"actor.adam.lr": 3e-7, "actor_learning_rate": 5e-7})
    assert recipe.settings["actor.optim.lr"] == 5e-7
    assert any(line.startswith("actor.adam.lr=3e-07") for line in recipe.lost)


OPTIMIZER = {
    "adam.lr": ("optim.lr", 3e-7),
    "adam.betas": ("optim.betas", [0.8, 0.9]),
    "adam.eps": ("optim.eps", 1e-6),
    "adam.weight_decay": ("optim.weight_decay", 0.1),
    "max_norm": ("grad_clip", 0.5),
    "min_lr_ratio": ("optim.min_lr_ratio", 0.2),
}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    (
        "trl",
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1},
        {
            "rollout.temperature": 0.7,
            "rollout.top_p": 0.9,
            "rollout.top_k": 40,
            "rollout.min_p": 0.1,
            "rollout.repetition_penalty": 1.1,
        },
        [],
    ),
    ("openrlhf", {"temperature": 0.7, "top_p": 0.9}, {"rollout.temperature": 0.7, "rollout.top_p": 0.9}, []),
    *(
        (
            "openrlhf",
            {f"{role}.{name}": value for name, (_, value) in OPTIMIZER.items()},
            {f"{role}.{ours}": value for ours, value in OPTIMIZER.values()},
            [],
        )
        for role in ("actor", "critic")
    ),
    (
        "openrlhf",
        {"l2": 0.1, "max_norm": 0.5, "adam_betas": [0.9, 0.99], "lr_warmup_ratio": 0.2, "lr_scheduler": "linear"},
        {
            f"{role}.{name}": value
            for role in ("actor", "critic")
            for name, value in {
                "grad_clip": 0.5,
                "optim.weight_decay": 0.1,
                "optim.betas": [0.9, 0.99],
                "optim.lr_scheduler_type": "linear",
            }.items()
        },
        ["actor.lr_warmup_ratio=0.2", "critic.lr_warmup_ratio=0.2"],
    ),
    ("openrlhf", {"actor.min_lr_ratio": 0.3, "actor.lr_warmup_ratio": 0.1}, {}, ["actor.lr_warmup_ratio=0.1"]),
    (
        "openrlhf",
        {},
        {
            **{f"{role}.optim.betas": [0.9, 0.95] for role in ("actor", "critic")},
            **{f"{role}.optim.weight_decay": 0.0 for role in ("actor", "critic")},
            **{f"{role}.optim.min_lr_ratio": 0.1 for role in ("actor", "critic")},
            **{f"{role}.optim.lr_scheduler_type": "cosine" for role in ("actor", "critic")},
            "algorithm.reward_clip_range": [-10, 10],
            "actor.clip_ratio_c": 1e9,
        },
        ["actor.lr_warmup_ratio=0.03", "critic.lr_warmup_ratio=0.03", "rollout.max_new_tokens"],
    ),
    (
        "openrlhf",
        {"ds.lora.rank": 8},
        {"model.lora.enabled": True, "model.lora.rank": 8, "model.lora.alpha": 16, "model.lora.dropout": 0},
        [],
    ),
    (
        "openrlhf",
        {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_threshold": [0.2, 4.0]},
        {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": 4.0,
            "algorithm.rollout_correction.rollout_is_threshold_lower": 0.2,
        },
        [],
    ),
    (
        "trl",
        {"use_peft": True},
        {"model.lora.enabled": True, "model.lora.rank": 16, "model.lora.alpha": 32, "model.lora.dropout": 0.05},
        ["lora_target_modules=None"],
    ),
    ("trl", {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}, {}, []),
    ("trl", {"use_peft": True, "lora_target_modules": "q_proj"}, {"model.lora.target_modules": ["q_proj"]}, []),
    ("trl", {"use_peft": True, "lora_target_modules": ["q_proj"]}, {"model.lora.target_modules": ["q_proj"]}, []),
    ("trl", {"use_peft": True, "lora_target_modules": ["all-linear"]}, {"model.lora.target_modules": "all-linear"}, []),
    ("trl", {"use_peft": True, "lora_target_modules": []}, {}, ["lora_target_modules=[]"]),
    ("trl", {"loss_type": "dr_grpo"}, {"algorithm.norm_adv_by_std_in_grpo": True}, []),
    (
        "trl",
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"algorithm.norm_adv_by_std_in_grpo": False},
        [],
    ),
    ("openrlhf", {"advantage_estimator": "dr_grpo"}, {"actor.loss_agg_mode": "token-mean"}, []),
    (
        "openrlhf",
        {"advantage_estimator": "dr_grpo", "policy_loss_type": "gspo"},
        {"actor.loss_agg_mode": "seq-mean-token-mean", "actor.policy_loss.loss_mode": "gspo"},
        [],
    ),
    ("trl", {"num_iterations": {"a": 1}}, {"actor.ppo_epochs": "missing"}, ["num_iterations={'a': 1}"]),
    ("trl", {"scale_rewards": "batch"}, {"algorithm.norm_adv_by_std_in_grpo": True}, ["scale_rewards=batch"]),
    (
        "trl",
        {"beta": 0.1},
        {
            "actor.use_bias_correction_kl": True,
            "actor.clip_ratio_c": 1e9,
            "backend.autocast": "bfloat16",
            "checkpoint.max_to_keep": None,
            "data.max_response_length": 512,
            "data.overlong_prompts": "error",
            "trainer.val_before_train": False,
        },
        ["max_prompt_length=None"],
    ),
    ("trl", {"max_prompt_length": 64}, {"data.max_prompt_length": 64, "data.overlong_prompts": "left"}, []),
    ("trl", {"use_vllm": True}, {"rollout.sleep_level": "missing"}, []),
    ("trl", {"use_vllm": True, "vllm_enable_sleep_mode": False}, {"rollout.sleep_level": 0}, []),
    ("trl", {"use_vllm": True, "vllm_enable_sleep_mode": True}, {"rollout.sleep_level": 2}, []),
    ("trl", {"delta": 2.0}, {"actor.clip_ratio_c": 2.0}, []),
    (
        "trl",
        {"eval_strategy": "steps", "eval_steps": 50, "num_iterations": 2, "max_steps": 100, "temperature": 0.5},
        {
            "trainer.test_freq": 25,
            "trainer.total_training_steps": 50,
            "trainer.save_freq": 250,
            "rollout.val_kwargs.n": 8,
            "rollout.val_kwargs.temperature": 0.5,
        },
        [],
    ),
    (
        "trl",
        {"sync_ref_model": True, "ref_model_sync_steps": 64, "num_iterations": 2, "steps_per_generation": 2},
        {"ref.update_freq": 16},
        [],
    ),
    ("trl", {"sync_ref_model": True, "num_iterations": 2}, {"ref.update_freq": 256}, []),
    ("trl", {"num_processes": 8, "num_machines": 2}, {"trainer.nproc": 4, "trainer.nnodes": 2}, []),
    ("trl", {"lora_r": 4}, {}, ["lora_r=4"]),
    ("trl", {"config_file": "zero3.yaml"}, {}, ["config_file=zero3.yaml: accelerate's file is not read"]),
    (
        "verl",
        {},
        {"checkpoint.async_save": False, "checkpoint.max_to_keep": None, "trainer.nproc": 8},
        [],
    ),
    ("verl", {"model.lora_rank": 4}, {"model.lora.alpha": 16}, []),
    (
        "verl",
        {"critic.optim.lr_warmup_steps": 10},
        {
            f"{role}.optim.{name}": value
            for role in ("actor", "critic")
            for name, value in (("decay_norm_and_bias", True), ("lr_scheduler_interval", "training_step"))
        },
        [],
    ),
    (
        "verl",
        {"actor.optim.weight_decay": 0, "critic.optim.weight_decay": 0.0},
        {"actor.optim.decay_norm_and_bias": "missing", "critic.optim.decay_norm_and_bias": "missing"},
        [],
    ),
    (
        "verl",
        {"algorithm.adv_estimator": "grpo"},
        {"actor.optim.decay_norm_and_bias": True, "critic.optim.decay_norm_and_bias": "missing"},
        [],
    ),
    (
        "verl",
        {"algorithm.filter_groups.enable": True},
        {"algorithm.filter_groups.metric": "seq_reward"},
        ["algorithm.filter_groups.max_num_gen_batches=0"],
    ),
]


@pytest.mark.parametrize(("trainer", "settings", "expected", "lost"), CASES)
def test_a_name_or_a_default_is_translated(
    trainer: str, settings: dict[str, Any], expected: dict[str, Any], lost: list[str]
) -> None:
    recipe = translate(trainer, settings)
    assert {key: recipe.settings.get(key, "missing") for key in expected} == expected
    assert [start for start in lost if not any(line.startswith(start) for line in recipe.lost)] == []


def test_a_written_setting_is_not_listed_as_lost() -> None:
    for role in ("actor", "critic"):
        for name, (_, value) in OPTIMIZER.items():
            recipe = translate("openrlhf", {f"{role}.{name}": value})
            assert not any(f"{role}.{name}" in line for line in [*recipe.lost, *recipe.unknown, *recipe.needless])
    assert "model.lora.enabled" not in translate("trl", {"lora_r": 4}).settings


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch --num_processes 4 train.py",
        "accelerate launch --multi_gpu --num_processes=4 train.py",
        "accelerate launch --num_processes=4 --multi_gpu train.py",
        "trl vllm-serve --model m &\naccelerate launch --num-processes 4 -m trl.scripts.grpo",
        "torchrun --nproc_per_node 4 train.py",
        "torchrun --standalone --nnodes=2 --nproc-per-node=2 --master_port 29500 train.py",
        "python -m torch.distributed.run --nproc_per_node 4 train.py",
        "deepspeed --num_gpus 4 train.py",
    ],
)
def test_the_launcher_sets_the_number_of_processes(command: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{command} --num_generations 8 --gradient_accumulation_steps 2 --model_name_or_path m\n")
    settings = read_settings(script)
    assert settings["num_processes"] == 4
    assert "model" not in settings
    assert "master_port" not in settings
    recipe = translate("trl", settings)
    assert recipe.settings["data.train_batch_size"] == 8 * 2 * 4 // 8
    assert recipe.settings["trainer.nproc"] * recipe.settings.get("trainer.nnodes", 1) == 4
    assert not any("num_processes" in line for line in recipe.lost)


SETTINGS = "--num_generations 8 --model_name_or_path m --bf16"
VERL = "python3 -m verl.trainer.main_ppo"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", " 2>&1 | tee log=1.txt"),
        ("", " |& tee log=1.txt"),
        ("", " > log.txt 2>&1 &"),
        ("", " &>> log=1.txt"),
        ("", " 2> >(tee log=1.txt)"),
        ("", "; echo log=1.txt"),
        ("", " && FOO=1 echo log=1.txt"),
        ("", " || exit 1"),
        ("", " & wait --bf17"),
        ("", "\nFOO=1 echo done log=1.txt"),
        ("", "\npython3 notify.py done"),
        ("python3 -m pip install trl; ", ""),
        ("A=1; B=x\nexport C=3 && ", "\n"),
        ("echo don\\'t # it's a comment with a '\nset -x\n", " # python eval.py --log 1"),
        ("< /dev/null nohup ", " </dev/null"),
        ("", " \\\r\n  2>&1 | tee log=1.txt"),
        ("if true; then ", "; fi"),
        ("# a comment ends here \\\n", ""),
    ],
)
@pytest.mark.parametrize("command", ["python train.py", "trl grpo"])
def test_a_command_ends_at_an_operator_or_the_end_of_its_line(
    command: str, before: str, after: str, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{before}{command} {SETTINGS}{after}\n")
    assert read_settings(script) == {"num_generations": 8, "model_name_or_path": "m", "bf16": True}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('A="x=1"\nA+=" y=2"\nCOMMAND $A', {"x": 1, "y": 2}),
        ("A=1; COMMAND x=$A", {"x": 1}),
        ("A=1 && B=2 && COMMAND x=$A y=$B", {"x": 1, "y": 2}),
        ("A=1\nif true; then A=2; fi\nA=3\nCOMMAND x=$A", {"x": 3}),
        ("for A in 2 3; do\n  B=4\n  COMMAND x=$B\ndone", {"x": 4}),
        ("main() {\n  local A=1\n  COMMAND x=$A\n}\nmain", {"x": 1}),
        ("declare -x A=1\nexport B=2 C='a b'\nCOMMAND x=$A y=$B z=\"$C\"", {"x": 1, "y": 2, "z": "a b"}),
        ("COMMAND x=$HOME/a --y $Z", {"x": "${oc.env:HOME}/a", "y": "${oc.env:Z}"}),
    ],
)
def test_a_variable_has_its_value(lines: str, expected: dict[str, object], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(lines.replace("COMMAND", VERL) + "\n")
    assert read_settings(script) == expected


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ('A=1\nif [ "$1" = big ]; then\n  A=2\nfi\nCOMMAND x=$A', "x=$A"),
        ('A=1\nif [ "$1" = big ]; then A=2; else A=3; fi\nCOMMAND x=$A', "x=$A"),
        ("A=1\nif true; then\n  A=2\nelse\n  COMMAND x=$A\nfi", "x=$A"),
        ('A=1\n[ -n "$BIG" ] && A=2\nCOMMAND x=$A', "x=$A"),
        ('A=1\n[ -n "$BIG" ] || A=2\nCOMMAND x=$A', "x=$A"),
        ('A=1\n[ -n "$BIG" ] && { A=2; B=3; }\nCOMMAND x=$A', "x=$A"),
        ("A=1 || A=2\nCOMMAND x=$A", "x=$A"),
        ("A=1\ncase $1 in\n big)\n A=2 ;;\nesac\nCOMMAND x=$A", "x=$A"),
        ("A=1\ncase $1 in\n big|large) A=2 ;;\nesac\nCOMMAND x=$A", "x=$A"),
        ("A=1\nf() { A=2; }\nf\nCOMMAND x=$A", "x=$A"),
        ("A=1\nf() {\n  A=2\n}\nf\nCOMMAND x=$A", "x=$A"),
        ("A=1\nif true; then declare -i A=2; fi\nCOMMAND x=$A", "x=$A"),
        ("A=1\nif true; then A=2; fi\nCOMMAND x=${A:-3}", "x=${A:-3}"),
        ("A=1\n((A=8))\nCOMMAND x=$A", "x=$A"),
        ("A=1\nlet A=8\nCOMMAND x=$A", "x=$A"),
        ("A=1\nread -r A < f\nCOMMAND x=$A", "x=$A"),
        ("A=1\nfor A in 2 3; do\nCOMMAND x=$A\ndone", "x=$A"),
        ("A=x=1\nif true; then A+=,2; fi\nA+=,3\nCOMMAND y=$A", "y=$A"),
        ('A="x=1"\nif true; then\n  A="x=2 y=3"\nfi\nCOMMAND $A z=4', "$A"),
        ("COMMAND $ARGS z=4", "$ARGS"),
        ("COMMAND $(cat args.txt) z=4", "$(cat args.txt)"),
        ("A=$(cat args.txt)\nCOMMAND $A z=4", "$(cat args.txt)"),
        ("COMMAND --beta 0.04 $MORE", "$MORE"),
        ("P=a/b\nCOMMAND x=${P##*/}", "x=${P##*/}"),
    ],
)
def test_what_only_the_shell_knows_is_one_message(lines: str, word: str, tmp_path: Path) -> None:
    """Such a word was dropped, or had the value of a branch that the script does not take."""
    script = tmp_path / "run.sh"
    script.write_text(lines.replace("COMMAND", VERL) + "\n")
    with pytest.raises(UserError, match=re.escape(f"the value of {word} is not known")):
        read_settings(script)


def test_the_launchers_variables_do_not_matter(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun $DISTRIBUTED {VERL.partition(' ')[2]} z=4\n")
    assert read_settings(script)["z"] == 4


def test_operators_in_quotes_and_placeholders_are_text(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"TWO='a=1\n  b=2'\n{VERL} $TWO c='x | y; z' d=\"1 > 2 && 3\" e=<here> "
        "g=${UNSET:-'a;b'} h=['console','wandb'] i='[1,\n2]' j=a\\;b k=m#1 > log.txt l=3\n"
    )
    found = read_settings(script)
    assert (found["a"], found["b"], found["c"], found["d"], found["e"]) == (1, 2, "x | y; z", "1 > 2 && 3", "<here>")
    assert (found["g"], found["i"], found["j"], found["k"], found["l"]) == ("a;b", [1, 2], "a;b", "m#1", 3)
    assert "log.txt" not in str(found)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"{VERL} data.train_batch_size=256", f"{VERL} data.max_response_length=8192"),
        (f"{VERL} data.train_batch_size=256", "python3 merge.py --local_dir x"),
        ("accelerate launch prepare.py --out x", f"{VERL} data.train_batch_size=256"),
        ("trl grpo --num_generations 8", "trl grpo --num_generations 16"),
    ],
)
@pytest.mark.parametrize("end", ["\n", " && ", "; ", " | ", " &\n", " \\\n  2>&1 | tee log.txt\n\n"])
def test_a_script_with_two_commands_is_one_message(first: str, second: str, end: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"set -x\nWANDB_API_KEY=SEKRET {first}{end}{second}\n")
    with pytest.raises(UserError, match="two commands with settings") as caught:
        read_settings(script)
    message = str(caught.value)
    assert message.startswith(f"{script}: ")
    assert first[:40] in message
    assert second[:40] in message
    assert "Keep one of them in the file" in message
    assert "SEKRET" not in message


def test_variables_of_env_and_installers_are_not_shown_and_no_commands(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"env KEY=SEKRET {VERL} data.train_batch_size=2\n{VERL} data.train_batch_size=4\n")
    with pytest.raises(UserError, match="two commands") as caught:
        read_settings(script)
    assert "SEKRET" not in str(caught.value)
    script.write_text(f"python3 -m pip install --upgrade trl\n{VERL} data.train_batch_size=4\n")
    assert read_settings(script) == {"data.train_batch_size": 4}


def test_an_array_beside_other_arguments_is_named(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f'DATA=(\n  data.train_files=a.parquet\n)\n{VERL} "${{DATA[@]}}" trainer.save_freq=5\n')
    with pytest.raises(UserError, match=r"\$\{DATA\[@\]\} is a shell array"):
        read_settings(script)
