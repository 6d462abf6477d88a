"""The command line: its options, and the error message of each mistake."""

import os
import signal
import subprocess
import sys

import pytest

import rlhf
from rlhf import train
from rlhf.config.help_texts import help_texts
from rlhf.config.known_settings import SETTINGS
from rlhf.config.resolved import from_yaml
from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from tests.support.commands import BUNDLED, RECIPES, ROOT, command_error, compose, run
from tests.support.refusals import says

WRONG_COMMANDS = [
    (["trainer.nproq=2"], "trainer.nproq=2: there is no setting trainer.nproq. Did you mean trainer.nproc?"),
    (["+trainer.x=1"], "trainer.x=1: there is no setting trainer.x. `--cfg job` prints all settings."),
    (["modle=tiny"], "modle=tiny: there is no setting modle. Did you mean model?"),
    (["model=tinny"], "model=tinny: the group has no such entry. Did you mean tiny? Choices: hf, tiny."),
    (["model=null"], "model=null: the group has no such entry. Choices: hf, tiny."),
    (["model={path: x}"], "model={'path': 'x'}: the group has no such entry. Choices: hf, tiny."),
    (["model@actor=tiny"], "model@actor=tiny: write GROUP=ENTRY, without @."),
    (["trainer.nproc=abc"], "trainer.nproc=abc: must be a whole number or null."),
    (["trainer.nproc=2.5"], "trainer.nproc=2.5: must be a whole number or null."),
    (["trainer.seed=null"], "trainer.seed=null: must be a whole number."),
    (["trainer.deterministic=maybe"], "trainer.deterministic=maybe: must be true or false or null."),
    (["trainer.check_memory=2"], "trainer.check_memory=2: must be true or false."),
    (["actor.use_remove_padding=0.5"], "actor.use_remove_padding=0.5: must be true or false or null."),
    (
        ["val_only=true"],
        "val_only=True: there is no setting val_only. An evaluation without training is a command of its own: python",
    ),
    (
        ["hydra.run.dir=."],
        "hydra.run.dir=.: there is no setting hydra.run.dir. The working directory never changes; the",
    ),
    (["trainer.logger=[wandb"], "trainer.logger=[wandb: cannot be read"),
    (["trainer.logger=wandb"], "trainer.logger=wandb: must be a list such as [a, b]. Write 'trainer.logger=[wandb]'."),
    (["trainer.nproc", "=", "2"], "trainer.nproc = 2: white space ends a setting; write trainer.nproc=2."),
    (
        ["data.train_files=[a.jsonl,", "b.jsonl]"],
        "data.train_files=[a.jsonl, b.jsonl]: white space ends a setting; quote it for the shell: 'data.train_files=[a",
    ),
    (
        ["actor_rollout_ref={}"],
        "actor_rollout_ref={}: there is no setting actor_rollout_ref. Leave this level out: actor",
    ),
    (
        ["model.path=$MODEL"],
        "model.path=$MODEL: is neither a folder here nor a Hub name of the form org/name. The shell",
    ),
    (["model.path=a/b/c"], "model.path=a/b/c: is neither a folder here nor a Hub name of the form org/name."),
    (
        ["--deepspeed", "ds.json"],
        "--deepspeed ds.json: there is no such option. Set backend=deepspeed and backend.zero",
    ),
    (
        ["resume_from_checkpoint=True"],
        "resume_from_checkpoint=True: there is no setting resume_from_checkpoint. The same",
    ),
    (["trainer.nproc=", "2"], "trainer.nproc = 2: white space ends a setting; write trainer.nproc=2."),
    (
        ["mine.yaml"],
        "mine.yaml: is not a setting. Put your own recipe into DIR/recipes/NAME.yaml, and select it with --config-dir",
    ),
    (
        ["config=mine.yaml"],
        "config=mine.yaml: there is no setting config. Put your own recipe into DIR/recipes/NAME.yaml",
    ),
    (
        ["recipes=mine.yaml"],
        "recipes=mine.yaml: there is no such recipe. Put your own recipe into DIR/recipes/NAME.yaml",
    ),
    (
        ["trainer.experiment_name=${oc.env:RLHF_UNSET}"],
        "trainer.experiment_name: the environment variable RLHF_UNSET is not set. Set it, or write ${oc.env:",
    ),
    (
        ["model=gpt2"],
        "model=gpt2: the group has no such entry. For a folder or a Hub name, write model.path=gpt2. Choices",
    ),
    (
        ["reward=a.py"],
        "reward=a.py: the group has no such entry. For your own function, write 'reward.functions=[FILE",
    ),
    (
        ["actor.optim.learning_rate=1"],
        "actor.optim.learning_rate=1: there is no setting actor.optim.learning_rate. Did you mean actor.optim.lr?",
    ),
    (["trainer.epochs=2"], "trainer.epochs=2: there is no setting trainer.epochs. Did you mean trainer.total_epochs?"),
    (["actor.optim=3"], "actor.optim=3: actor.optim is a section; set one of its settings, such as actor.optim.lr."),
    (["actor.optim={lrr: 1}"], "actor.optim.lrr=1: there is no setting actor.optim.lrr. Did you mean actor.optim.lr?"),
    (["trainer.nproc"], "trainer.nproc: has no value; write trainer.nproc=VALUE."),
    (["trainer.nproq"], "trainer.nproq: has no value; write trainer.nproc=VALUE."),
    (["~trainer.nproc"], "~trainer.nproc: settings cannot be removed; write KEY=null, or recipes=null for no recipe."),
    (
        ["data.train_files=a,b"],
        "data.train_files=a,b: one run takes one value. Write a list in brackets, KEY=[a,b], or add -m",
    ),
    (["hydra.run.dir=x"], "hydra.run.dir=x: there is no setting hydra.run.dir."),
    (["recipes=null"], "model.path is not set: add model.path=VALUE to the command or recipe."),
    (
        ["trainer.experiment_name=${trainer.nope}"],
        "trainer.experiment_name: Interpolation key 'trainer.nope' not found.",
    ),
    (['trainer.experiment_name="${a"'], "trainer.experiment_name=${a: no viable alternative at input"),
    (["rollout.top_p=1.5"], "rollout.top_p=1.5: must be at most 1."),
    (["rollout.n=1"], "rollout.n=1: grpo compares the samples of one prompt; set rollout.n to 2 or more."),
    (["model.lora.rank=32"], "model.lora.rank=32: has effect only with model.lora.enabled=true; set"),
    (
        ["rollout.lora=merged"],
        "rollout.lora=merged: has effect only with model.lora.enabled=true; set",
    ),
    (
        ["critic.optim.lr=1e-4"],
        "critic.optim.lr=0.0001: has effect only with a critic, and algorithm.adv_estimator=grpo trains no critic. "
        "Remove it, or set algorithm=ppo.",
    ),
    (["algorithm=dappo"], "algorithm=dappo: the group has no such entry. Did you mean dapo?"),
    (["algorithm.adv_estimator=ppo"], "algorithm.adv_estimator=ppo: ppo is a whole algorithm; write algorithm=ppo."),
    (["actor.policy_loss.loss_mode=my.py:f"], "actor.policy_loss.loss_mode=my.py:f: no file "),
    (["recipes=minimal", "model.path=a/b"], "data.train_files is not set: add data.train_files=VALUE to the command"),
    (
        ["model=Qwen/Qwen2.5-0.5B"],
        "model=Qwen/Qwen2.5-0.5B: the group has no such entry. Did you mean model.path=Qwen/",
    ),
    (["data=train.jsonl"], "data=train.jsonl: the group has no such entry. Did you mean data.train_files=train.jsonl?"),
    (["reward=a.py:f"], "reward=a.py:f: the group has no such entry. Did you mean 'reward.functions=[a.py:f]'?"),
    (["recipe=minimal"], "recipe=minimal: there is no setting recipe. Did you mean recipes?"),
    (["trainer.device=gpu"], "trainer.device=gpu: must be one of auto, cpu, cuda. Did you mean cuda?"),
    (
        ["actor.kl_loss_type=low_var_kl"],
        "actor.kl_loss_type=low_var_kl: must be one of k1, k2, k3, abs, k1+, k3+, abs+.",
    ),
    (["actor_rollout_ref.actor.clip_ratio=0.2"], "actor_rollout_ref.actor.clip_ratio=0.2: there is no setting"),
    (["--config-dir", "/nowhere"], "--config-dir /nowhere: there is no such folder. Correct"),
    (["--cfg", "hydra"], "argument --cfg: invalid choice: 'hydra'"),
    (["--nproc", "2"], "--nproc 2: settings are written without dashes. Did you mean trainer.nproc=2?"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG_COMMANDS, ids=[" ".join(argv) for argv, _ in WRONG_COMMANDS])
def test_wrong_commands(capsys, argv, message):
    error = command_error(capsys, *argv)
    assert error.startswith(message)
    assert "\n" not in error


def test_an_unknown_recipe_lists_the_known(capsys):
    error = command_error(capsys, "recipes=ofline")
    assert error.startswith("recipes=ofline: there is no such recipe. Did you mean offline? Choices: ")
    assert all(name in error for name in RECIPES)


def test_an_unknown_recipe_without_a_folder_names_the_option(capsys, tmp_path):
    says(command_error(capsys, "recipes=mine"), "DIR/recipes/mine.yaml", "--config-dir DIR", "Choices: ")
    searched = command_error(capsys, "--config-dir", str(tmp_path), "recipes=mine")
    says(searched, f"{tmp_path} (--config-dir) has no recipes/mine.yaml", "Choices: ")


def test_all_mistakes_of_a_command_at_once(capsys):
    error = command_error(capsys, "model=tinny", "trainer.nproq=2", "recipes=ofline").splitlines()
    assert [line.split("=")[0] for line in error] == ["model", "trainer.nproq", "recipes"]
    error = command_error(capsys, "trainer.nproc=abc", "actor.optim.lr=x").splitlines()
    assert [line.split("=")[0] for line in error] == ["trainer.nproc", "actor.optim.lr"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_early_request_to_stop_ends_the_command_in_one_line(tmp_path, number):
    (tmp_path / "hydra.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf.train"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    expected = f"{number.name} while no rank was training. The same command starts the run again.\n"
    assert process.communicate()[1].decode() == expected
    assert process.returncode == EXIT_REQUEUE


def test_help_names_groups_and_recipes(capsys):
    assert train.main(["--help"]) == EXIT_DONE
    page = capsys.readouterr().out
    assert page.startswith("usage: python -m rlhf.train")
    entries = (name for group in BUNDLED.groups for name in BUNDLED.entries(group))
    for name in [*BUNDLED.groups, *RECIPES, *entries]:
        assert name in page


def test_cfg_job_prints_the_resolved_configuration_and_leaves_nothing_behind(tmp_path):
    done = run(tmp_path, "-m", "rlhf.train", "--cfg", "job", "trainer.seed=9")
    assert done.returncode == EXIT_DONE, done.stderr
    assert done.stderr == ""
    assert from_yaml(done.stdout) == compose("trainer.seed=9")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line_without_traceback(tmp_path):
    done = run(tmp_path, "-m", "rlhf.train", "trainer.nproq=2")
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr == "error: trainer.nproq=2: there is no setting trainer.nproq. Did you mean trainer.nproc?\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_cfg_job_prints_missing_settings_as_question_marks(capsys):
    assert train.main(["--cfg", "job", "recipes=minimal", "trainer.seed=9"]) == EXIT_DONE
    out, err = capsys.readouterr()
    assert "path: ???" in out.replace("'", "")
    assert "  seed: 9" in out
    assert [line.partition(" ")[0] for line in err.splitlines()] == ["data.train_files", "model.path"]


def test_cfg_job_rejects_the_settings_that_a_run_rejects(capsys):
    assert train.main(["--cfg", "job", "rollout.n=1"]) == EXIT_USER_ERROR
    out, err = capsys.readouterr()
    assert "  n: 1\n" in out
    assert err.startswith("error: rollout.n=1: grpo compares")


def test_cfg_job_has_the_help_of_every_setting(capsys):
    train.main(["--cfg", "job"])
    text = " ".join(line.strip().lstrip("# ") for line in capsys.readouterr().out.splitlines())
    assert help_texts().keys() == SETTINGS.keys()
    assert [key for key, help_text in help_texts().items() if help_text not in text] == []


def test_version_and_info(capsys):
    assert train.main(["--version"]) == EXIT_DONE
    assert capsys.readouterr().out.startswith(f"rlhf {rlhf.__version__} (Python 3.")
    assert train.main(["--info"]) == EXIT_DONE
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"].startswith("2.")
    assert rows["GPU"]
    assert {"rlhf", "cores", "memory", "vllm", "deepspeed", "wandb"} <= rows.keys()
