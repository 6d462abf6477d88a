import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf
from rlhf import train
from rlhf.compose import GLOBAL_PACKAGE, compose_config
from rlhf.config import Config
from rlhf.config.help_texts import help_texts
from rlhf.config.library import Library
from rlhf.config.resolved import from_yaml
from rlhf.config.schema import SETTINGS
from rlhf.config.validate import validate
from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, UserError

ROOT = Path(train.__file__).resolve().parents[1]
BUNDLED = Library.find(None)
RECIPES = BUNDLED.entries("recipes")
ENTRIES = [(group, name) for group in BUNDLED.groups for name in BUNDLED.entries(group)]


def compose(*overrides: str, config_dir: Path | None = None):
    return compose_config(list(overrides), Library.find(config_dir))


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What `python -m rlhf.train ARGV` says on stderr when it refuses."""
    assert train.main(list(argv)) == EXIT_USER_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    return err.rstrip("\n")


def to_be_set(path: Path) -> list[str]:
    """Overrides for what a recipe or entry leaves to the user."""
    text = path.read_text()
    return ["model.path=org/name"] * ("path: ???" in text) + ["data.train_files=a.jsonl"] * any(
        f"train_files: {open}" in text for open in ("???", "[]")
    )


@pytest.fixture
def user_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "it's mine"
    (folder / "recipes").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_compose_and_validate(name):
    validate(compose(f"recipes={name}", *to_be_set(RECIPES[name])), {})


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_start_with_the_package_line_and_a_description(name):
    first, second = RECIPES[name].read_text().splitlines()[:2]
    assert first == GLOBAL_PACKAGE
    assert second.startswith("# ")


@pytest.mark.parametrize(("group", "name"), ENTRIES)
def test_group_entries_compose_and_validate(group, name, monkeypatch):
    # Whether vLLM is there is the machine's business.
    monkeypatch.setattr("rlhf.config.rollout_rules.installation_problem", lambda: None)
    validate(compose(f"{group}={name}", *to_be_set(BUNDLED.entries(group)[name])), {})


def test_every_group_is_a_section_and_offers_a_choice():
    assert set(BUNDLED.groups) <= set(vars(Config()))
    assert all(len(BUNDLED.entries(group)) > 1 for group in BUNDLED.groups)


def test_the_plain_command_is_the_offline_recipe():
    config = compose()
    assert config == compose("recipes=offline")
    assert config.model.path == str(ROOT / "rlhf" / "models" / "tiny_policy")
    assert config.data.train_files is None
    assert config.reward.functions == ["reasoning_gym"]


def test_another_recipe_replaces_the_offline_one():
    config = compose("recipes=minimal", "model.path=org/name", "data.train_files=a.jsonl")
    assert config.trainer.experiment_name == "minimal"
    assert config.trainer.total_training_steps is None
    assert config.data.reasoning_gym.config == {}
    assert compose("recipes=null", "model.path=org/name").trainer.experiment_name == "default"


def test_a_group_of_the_command_line_fills_in_what_a_recipe_leaves_open():
    config = compose("recipes=minimal", "model=tiny", "data.train_files=a.jsonl")
    assert config.model.path == str(ROOT / "rlhf" / "models" / "tiny_policy")
    with pytest.raises(UserError, match=r"model\.path is not set"):
        compose("recipes=minimal", "model=hf", "data.train_files=a.jsonl")


def test_the_command_line_wins_over_the_recipe_wins_over_groups():
    assert compose().rollout.n == 8
    assert compose("rollout.n=4").rollout.n == 4
    assert compose("rollout.n=4", "recipes=offline", "rollout.n=2").rollout.n == 2
    config = compose("model=hf", "model.path=org/name", "reward=exact_match")
    assert (config.model.path, config.reward.functions) == ("org/name", ["exact_match"])


def test_values_of_many_shapes():
    config = compose(
        "trainer.logger=[wandb,tensorboard]",
        "actor.optim={lr: 0.5, betas: [0.1, 0.2]}",
        "data.reasoning_gym.config.max_digits=1",
        "data.train_files=[a.jsonl,'b c.parquet']",
        "data.val_files=openai/gsm8k:main@test",
        "model.path=~/models/a=b",
        "reward.writable=[~/x,~]",
        "+trainer.total_training_steps=null",
        "trainer.experiment_name=seed_${trainer.seed}",
    )
    assert config.trainer.logger == ["wandb", "tensorboard"]
    assert (config.actor.optim.lr, config.actor.optim.betas) == (0.5, [0.1, 0.2])
    assert config.data.reasoning_gym.config["max_digits"] == 1
    assert config.data.train_files == ["a.jsonl", "b c.parquet"]
    assert config.data.val_files == "openai/gsm8k:main@test"
    assert (config.model.path, config.reward.writable) == ("~/models/a=b", ["~/x", "~"])
    assert config.trainer.total_training_steps is None
    assert config.trainer.experiment_name == "seed_1"


def test_a_mapping_replaces_the_one_of_the_recipe():
    config = compose("data.reasoning_gym.task=leg_counting", "data.reasoning_gym.config={}")
    assert config.data.reasoning_gym.config == {}


def test_recipes_and_entries_of_the_user(user_dir):
    (user_dir / "model").mkdir()
    (user_dir / "model" / "mine.yaml").write_text("path: org/mine\n")
    (user_dir / "recipes" / "base.yaml").write_text(
        "# @package _global_\n# Ours.\ndefaults:\n  - override /model: mine\ntrainer:\n  seed: 5\n"
    )
    (user_dir / "recipes" / "more.yaml").write_text(
        "# @package _global_\ndefaults:\n  - base\n  - _self_\nrollout:\n  n: 3\n"
    )
    config = compose("recipes=more", config_dir=user_dir)
    assert (config.model.path, config.trainer.seed, config.rollout.n) == ("org/mine", 5, 3)
    config = compose("recipes=[offline,more]", "model=tiny", config_dir=user_dir)
    assert (config.trainer.experiment_name, config.rollout.n) == ("offline", 3)
    assert "base" in (page := Library.find(user_dir).help_page())
    assert "Ours." in page


def test_config_dir_may_be_relative(user_dir, monkeypatch):
    (user_dir / "recipes" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  seed: 5\nmodel:\n  path: a/b\n")
    monkeypatch.chdir(user_dir.parent)
    assert compose("recipes=mine", config_dir=Path(user_dir.name)).trainer.seed == 5


def test_a_wheel_holds_conf_and_recipes_inside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "rlhf"
    for folder in ("conf", "recipes"):
        shutil.copytree(ROOT / folder, package / folder)
    monkeypatch.setattr("rlhf.config.library.PACKAGE", package)
    monkeypatch.setattr("rlhf.compose.PACKAGE", package)
    assert compose().model.path == str(package / "models" / "tiny_policy")


WRONG_COMMANDS = [
    (["trainer.nproq=2"], "trainer.nproq=2: there is no setting trainer.nproq. Did you mean trainer.nproc?"),
    (["+trainer.x=1"], "trainer.x=1: there is no setting trainer.x. `--cfg job` prints all settings."),
    (["modle=tiny"], "modle=tiny: there is no setting modle. Did you mean model?"),
    (["model=tinny"], "model=tinny: the group has no such entry. Did you mean tiny? Choices: hf, tiny."),
    (["model=null"], "model=null: the group has no such entry. Choices: hf, tiny."),
    (["model={path: x}"], "model={'path': 'x'}: the group has no such entry. Choices: hf, tiny."),
    (["model@actor=tiny"], "model@actor=tiny: write GROUP=ENTRY, without @."),
    (["trainer.nproc=abc"], "trainer.nproc=abc: must be a whole number."),
    (["trainer.nproc=2.5"], "trainer.nproc=2.5: must be a whole number."),
    (["trainer.nproc=null"], "trainer.nproc=null: must be a whole number."),
    (["trainer.deterministic=maybe"], "trainer.deterministic=maybe: must be true or false or null."),
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
        "mine.yaml: is no setting. A recipe of your own is DIR/recipes/NAME.yaml, chosen with --config-dir",
    ),
    (
        ["config=mine.yaml"],
        "config=mine.yaml: there is no setting config. A recipe of your own is DIR/recipes/NAME.yaml",
    ),
    (
        ["recipes=mine.yaml"],
        "recipes=mine.yaml: there is no such recipe. A recipe of your own is DIR/recipes/NAME.yaml",
    ),
    (
        ["model=gpt2"],
        "model=gpt2: the group has no such entry. A folder or a Hub name is written model.path=gpt2. Choices",
    ),
    (
        ["reward=a.py"],
        "reward=a.py: the group has no such entry. A function of yours is written 'reward.functions=[FILE",
    ),
    (
        ["actor.optim.learning_rate=1"],
        "actor.optim.learning_rate=1: there is no setting actor.optim.learning_rate. Did you mean actor.optim.lr?",
    ),
    (["trainer.epochs=2"], "trainer.epochs=2: there is no setting trainer.epochs. Did you mean trainer.total_epochs?"),
    (["actor.optim=3"], "actor.optim=3: actor.optim is a section; set what it holds, such as actor.optim.lr."),
    (["actor.optim={lrr: 1}"], "actor.optim.lrr=1: there is no setting actor.optim.lrr. Did you mean actor.optim.lr?"),
    (["trainer.nproc"], "trainer.nproc: has no value; write trainer.nproc=VALUE."),
    (["trainer.nproq"], "trainer.nproq: has no value; write trainer.nproc=VALUE."),
    (["~trainer.nproc"], "~trainer.nproc: settings cannot be removed; write KEY=null, or recipes=null for no recipe."),
    (
        ["data.train_files=a,b"],
        "data.train_files=a,b: one run takes one value; a list is written in brackets, KEY=[a,b], and -m makes",
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
    (
        ["critic.optim.lr=1e-4"],
        "critic.optim.lr=0.0001: has effect only with a critic, and algorithm.adv_estimator=grpo trains none. Remove "
        "it, or set algorithm=ppo.",
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
    (["--config-dir", "/nowhere"], "--config-dir /nowhere: there is no such folder."),
    (["--cfg", "hydra"], "argument --cfg: invalid choice: 'hydra'"),
    (["--nproc", "2"], "--nproc 2: settings are written without dashes. Did you mean trainer.nproc=2?"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG_COMMANDS, ids=[" ".join(argv) for argv, _ in WRONG_COMMANDS])
def test_wrong_commands(capsys, argv, message):
    said = refusal(capsys, *argv)
    assert said.startswith(message)
    assert "\n" not in said


def test_an_unreadable_value(capsys):
    said = refusal(capsys, "trainer.logger=[wandb")
    assert said.startswith("trainer.logger=[wandb: cannot be read")


def test_an_unknown_recipe_lists_the_known(capsys):
    said = refusal(capsys, "recipes=ofline")
    assert said.startswith("recipes=ofline: there is no such recipe. Did you mean offline? Choices: ")
    assert all(name in said for name in RECIPES)


def test_a_recipe_in_another_place_is_found(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(GLOBAL_PACKAGE)
    for argv in (["recipes=mine"], ["--config-dir", ".", "recipes=mine"]):
        said = refusal(capsys, *argv)
        assert (
            f"There is {tmp_path}/mine.yaml: move it into {tmp_path}/recipes, and add --config-dir {tmp_path}." in said
        )
    (tmp_path / "recipes").mkdir()
    (tmp_path / "mine.yaml").rename(tmp_path / "recipes" / "mine.yaml")
    said = refusal(capsys, "recipes=mine")
    assert f"There is one in {tmp_path}/recipes: add --config-dir {tmp_path}." in said


def test_all_mistakes_of_a_command_at_once(capsys):
    said = refusal(capsys, "model=tinny", "trainer.nproq=2", "recipes=ofline").splitlines()
    assert [line.split("=")[0] for line in said] == ["model", "trainer.nproq", "recipes"]
    said = refusal(capsys, "trainer.nproc=abc", "actor.optim.lr=x").splitlines()
    assert [line.split("=")[0] for line in said] == ["trainer.nproc", "actor.optim.lr"]


P = "# @package _global_\n"
BROKEN_FILES = {
    "dotted key": (P + "trainer.seed: 1\n", "{file}: trainer.seed: sections are nested in a recipe. Write `seed:`"),
    "unknown key": (P + "trainer:\n  sed: 1\n", "{file}: there is no setting trainer.sed. Did you mean trainer.seed?"),
    "unknown section": (P + "trianer:\n  seed: 1\n", "{file}: there is no setting trianer. Did you mean trainer?"),
    "wrong type": (P + "trainer:\n  seed: foo\n", "{file}: trainer.seed: Value 'foo' of type 'str' could not be"),
    "value for a section": (P + "trainer: 5\n", "{file}: Merge error: int is not a subclass of TrainerConfig"),
    "a list": (P + "- 5\n", "{file}: holds a list, not a mapping of settings. Write each section"),
    "a list without a package line": ("- 5\n", "{file}: holds a list, not a mapping of settings."),
    "a number": (P + "42\n", "{file}: holds one value, not a mapping of settings."),
    "a text": (P + "trainer.seed=3\n", "{file}: holds one value, not a mapping of settings."),
    "broken YAML": (P + "trainer:\n  seed: 1\n bar: [\n", "{file}:4: not valid YAML: expected <block end>"),
    "tab": (P + "trainer:\n\tseed: 1\n", "{file}:3: not valid YAML: found character"),
    "twice": (P + "trainer:\n  seed: 1\n  seed: 2\n", "{file}:4: not valid YAML: found duplicate key seed."),
    "binary": ("\x00\x01", "recipes=[mine]: not a text file in YAML: "),
    "no package line": ("trainer:\n  seed: 1\n", "{file}: the first line of a recipe must be `# @package _global_`."),
    "unknown entry as in a command": (
        P + "algorithm: pppo\n",
        "recipes=[mine]: the defaults name algorithm=pppo, which does not exist. Did you mean ppo?",
    ),
    "a model for an entry": (
        P + "model: Qwen/a\n",
        "recipes=[mine]: the defaults name model=Qwen/a, which does not exist. Did you mean model.path=Qwen/a?",
    ),
    "unknown entry": (
        P + "defaults:\n  - override /model: tinny\n",
        "recipes=[mine]: the defaults name model=tinny, which does not exist. Did you mean tiny? Choices: hf, tiny.",
    ),
    "unknown file": (P + "defaults:\n  - /nope\n", "recipes=[mine]: the defaults name nope, which does not exist."),
    "unknown group": (
        P + "defaults:\n  - override /modle: tiny\n",
        "{file}: there is no group modle. Did you mean model? Choices: algorithm, backend, data,",
    ),
    "section without entries": (
        P + "defaults:\n  - override /trainer: default\n",
        "{file}: trainer is a section without entries to choose from: remove `override /trainer`, and",
    ),
    "no override": (P + "defaults:\n  - /model: tiny\n", "recipes=[mine]: Multiple values for model. To override"),
    "bad interpolation": (P + "trainer:\n  project_name: ${a\n", "recipes=[mine]: trainer.project_name=${{a: "),
    "lost interpolation": (
        P + "model:\n  path: a/b\ntrainer:\n  project_name: ${a}\n",
        "trainer.project_name: Interpolation key 'a' not found.",
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_broken_recipes(capsys, user_dir, text, message):
    file = user_dir / "recipes" / "mine.yaml"
    file.write_text(text)
    said = refusal(capsys, "--config-dir", str(user_dir), "recipes=mine")
    assert said.startswith(message.format(file=file))
    assert "\n" not in said


def test_a_name_that_is_taken_is_refused(capsys, user_dir):
    file = user_dir / "recipes" / "offline.yaml"
    file.write_text(P)
    said = refusal(capsys, "--config-dir", str(user_dir), "recipes=offline")
    assert said.startswith(f"{file}: recipes=offline already means {RECIPES['offline']}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_early_request_to_stop_ends_the_command_in_one_line(tmp_path, number):
    (tmp_path / "hydra.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf.train"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where pytest runs in the background
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    said = f"{number.name} while no rank was training. The same command goes on from there.\n"
    assert process.communicate()[1].decode() == said
    assert process.returncode == EXIT_REQUEUE


def test_help_names_groups_and_recipes(capsys):
    assert train.main(["--help"]) == EXIT_DONE
    page = capsys.readouterr().out
    assert page.startswith("usage: python -m rlhf.train")
    for name in [*BUNDLED.groups, *RECIPES, *(name for _, name in ENTRIES)]:
        assert name in page


RUN_AND_LIST_MODULES = """
import sys
from rlhf.train import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "datasets", "reasoning_gym"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "argument", ["trainer.nproq=2", "trainer.nproc=abc", "rollout.n=1", "recipes=nope", "--help", "--info"]
)
def test_answers_before_anything_heavy_is_imported(tmp_path, argument):
    done = run(tmp_path, "-c", RUN_AND_LIST_MODULES, argument)
    assert done.returncode == (EXIT_DONE if argument.startswith("--") else EXIT_USER_ERROR), done.stderr


GOOD_ROWS = '{"prompt": "1", "answer": "1"}\n' * 3
EARLY: dict[str, tuple[str, dict[str, str], str]] = {
    "a broken line": ("data.train_files=bad.jsonl", {"bad.jsonl": GOOD_ROWS + "{oh\n"}, "line 4 is not JSON"),
    "no template": ("", {"model/chat_template.jinja": ""}, "its tokenizer has no chat template"),
    "no weights": ("", {"model/model.safetensors": ""}, "the folder has no weights (*.safetensors)."),
    "no login": ("trainer.logger=[wandb]", {}, "nobody is logged in to wandb. Run `wandb login`, or set WANDB_API_KEY"),
    "a broken template": (
        "model.chat_template=own.jinja",
        {"own.jinja": "{% if %}"},
        "own.jinja, line 1: not a valid chat template",
    ),
    "a template that fails": (
        "model.chat_template=own.jinja",
        {"own.jinja": "{{ messages[0].content + greeting }}"},
        "a.jsonl line 1: the chat template (model.chat_template=own.jinja) refuses the prompt (roles: user): Undefined",
    ),
    "a name on the Hub": (
        "model.path=org/nowhere",
        {},
        "model.path=org/nowhere is no local folder, and the Hub can't be reached (LocalEntryNotFoundError). Give a",
    ),
    "lengths": ("data.max_response_length=4096", {}, "positions, but the model has 512 (max_position_embeddings)."),
    "a vision model": (
        "model.path=vit",
        {"vit/config.json": '{"model_type": "vit"}'},
        "model.path=vit: model_type vit",
    ),
    "a reward file": (
        "reward.functions=[own.py:f]",
        {"own.py": "import not_there\ndef f(solution_str): return 1.0\n"},
        "own.py:f cannot be imported: ModuleNotFoundError: No module named 'not_there'. Correct the file.",
    ),
    "an estimator": (
        "algorithm.adv_estimator=own.py:f",
        {"own.py": "def f(inputs, config): ...\nraise RuntimeError('at import')\n"},
        "algorithm.adv_estimator=own.py:f cannot be imported: RuntimeError: at import. Correct the file.",
    ),
}


@pytest.mark.parametrize("mistake", EARLY)
def test_mistakes_in_files_are_told_before_torch_is_imported(tmp_path, mistake):
    setting, files, said = EARLY[mistake]
    model = shutil.copytree(ROOT / "rlhf" / "models" / "tiny_policy", tmp_path / "model")
    shutil.copytree(model, tmp_path / "vit")
    (tmp_path / "a.jsonl").write_text(GOOD_ROWS)
    for name, text in files.items():
        (tmp_path / name).write_text(text) if text else (tmp_path / name).unlink()
    settings = ["recipes=minimal", "model.path=model", "data.train_files=a.jsonl", *filter(None, [setting])]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    script = RUN_AND_LIST_MODULES.replace('"transformers", ', "")  # templates are rendered by it, without torch
    done = subprocess.run(
        [sys.executable, "-c", script, *settings],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == EXIT_USER_ERROR, done.stderr
    assert said in done.stderr
    assert not (tmp_path / "checkpoints").exists()


def test_cfg_job_prints_the_resolved_configuration_and_leaves_nothing_behind(tmp_path):
    done = run(tmp_path, "-m", "rlhf.train", "--cfg", "job", "trainer.seed=9")
    assert done.returncode == EXIT_DONE, done.stderr
    assert done.stderr == ""
    assert from_yaml(done.stdout) == compose("trainer.seed=9")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line_without_traceback(tmp_path):
    done = run(tmp_path, "-m", "rlhf.train", "trainer.nproq=2")
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr == "trainer.nproq=2: there is no setting trainer.nproq. Did you mean trainer.nproc?\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_compose_config_raises_user_errors_only():
    with pytest.raises(UserError, match="there is no setting"):
        compose("trainer.nproq=2")


def test_cfg_job_leaves_what_is_missing_and_says_so(capsys):
    assert train.main(["--cfg", "job", "recipes=minimal", "trainer.seed=9"]) == EXIT_DONE
    out, err = capsys.readouterr()
    assert "path: ???" in out.replace("'", "")
    assert "  seed: 9" in out
    assert [line.partition(" ")[0] for line in err.splitlines()] == ["data.train_files", "model.path"]


def test_cfg_job_refuses_what_a_run_refuses(capsys):
    assert train.main(["--cfg", "job", "rollout.n=1"]) == EXIT_USER_ERROR
    out, err = capsys.readouterr()
    assert "  n: 1\n" in out
    assert err.startswith("rollout.n=1: grpo compares")


def test_cfg_job_has_the_help_of_every_setting(capsys):
    train.main(["--cfg", "job"])
    text = " ".join(line.strip().lstrip("# ") for line in capsys.readouterr().out.splitlines())
    assert help_texts().keys() == SETTINGS.keys()
    assert [key for key, said in help_texts().items() if said not in text] == []


def test_a_file_may_choose_entries_as_the_command_does(user_dir, capsys):
    (user_dir / "recipes" / "mine.yaml").write_text(
        P + "algorithm: ppo\nmodel: tiny\ndata: reasoning_gym\ntrainer:\n  seed: 5\n"
    )
    (user_dir / "recipes" / "more.yaml").write_text(P + "defaults:\n  - mine\n  - _self_\nalgorithm: dapo\n")
    config = compose("recipes=mine", config_dir=user_dir)
    assert (config.algorithm.adv_estimator, config.trainer.seed) == ("gae", 5)
    assert config == compose("recipes=mine", "algorithm=ppo", config_dir=user_dir)
    assert compose("recipes=mine", "algorithm=gspo", config_dir=user_dir).actor.policy_loss.loss_mode == "gspo"
    assert compose("recipes=more", config_dir=user_dir).algorithm.filter_groups.enable
    twice = user_dir / "recipes" / "twice.yaml"
    twice.write_text(P + "defaults:\n  - override /algorithm: grpo\nalgorithm: ppo\n")
    said = refusal(capsys, "--config-dir", str(user_dir), "recipes=twice")
    assert said == f"{twice}: algorithm is chosen twice; leave one out."


def test_version_and_info(capsys):
    assert train.main(["--version"]) == EXIT_DONE
    assert capsys.readouterr().out.startswith(f"rlhf {rlhf.__version__} (Python 3.")
    assert train.main(["--info"]) == EXIT_DONE
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"].startswith("2.")
    assert rows["GPU"]
    assert {"rlhf", "cores", "memory", "vllm", "deepspeed", "wandb"} <= rows.keys()
