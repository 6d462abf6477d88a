"""Configurations from bundled and users' groups and recipes and from the command line, and broken recipes."""

import shutil
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.config.file_problems import GLOBAL_PACKAGE
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from tests.support.commands import BUNDLED, RECIPES, ROOT, command_error, compose
from tests.support.refusals import says

ENTRIES = [(group, name) for group in BUNDLED.groups for name in BUNDLED.entries(group)]


def to_be_set(path: Path) -> list[str]:
    """Return overrides for the settings that a recipe or entry leaves to the user."""
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
def test_recipes_compose_and_validate(name, monkeypatch):
    monkeypatch.setattr("rlhf.config.rules.rollout_rules.installation_problem", lambda: None)  # vLLM may be missing
    validate(compose(f"recipes={name}", *to_be_set(RECIPES[name])), {})


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_start_with_the_package_line_and_a_description(name):
    first, second = RECIPES[name].read_text().splitlines()[:2]
    assert first == GLOBAL_PACKAGE
    assert second.startswith("# ")


@pytest.mark.parametrize(("group", "name"), ENTRIES)
def test_group_entries_compose_and_validate(group, name, monkeypatch):
    # The test must not depend on whether vLLM and Ray are installed.
    monkeypatch.setattr("rlhf.config.rules.rollout_rules.installation_problem", lambda: None)
    monkeypatch.setattr("rlhf.config.rules.validate.missing_ray", lambda config: [])
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


P = "# @package _global_\n"


def test_an_entry_that_a_recipe_replaces(user_dir, capsys):
    text = P + "defaults:\n  - minimal\n  - _self_\nreward:\n  functions: [math_verify]\nmodel:\n  path: a/b\n"
    (user_dir / "recipes" / "mine.yaml").write_text(
        text + "data:\n  train_files: a.jsonl\nrollout:\n  name: embedded\n"
    )
    mine = ["--config-dir", str(user_dir), "recipes=mine"]
    error = command_error(capsys, *mine, "model=tiny", "rollout=auto", "reward=exact_match")
    says(
        error, "model=tiny", "recipe", "model.path=a/b", "model.path", "'model.path=${rlhf.package:models/tiny_policy}'"
    )
    says(error, "reward=exact_match", "recipe", "reward.functions=['math_verify']", "'reward.functions=[exact_match]'")
    says(error, "rollout=auto", "recipe", "rollout.name=embedded", "rollout.name=null")
    kept = compose("recipes=mine", "model=hf", "rollout=embedded", "reward=math_verify", config_dir=user_dir)
    assert kept == compose("recipes=mine", config_dir=user_dir)


def test_a_recipe_may_choose_group_entries(user_dir, capsys):
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
    error = command_error(capsys, "--config-dir", str(user_dir), "recipes=twice")
    assert error == f"{twice}: algorithm is selected twice, by `algorithm:` and by `override /algorithm:`; remove one."


BROKEN_FILES = {
    "a count": (P + "actor:\n  use_remove_padding: 2\n", "{file}: actor.use_remove_padding=2: must be true or false"),
    "dotted key": (P + "trainer.seed: 1\n", "{file}: trainer.seed: sections are nested in a recipe. Write `seed:`"),
    "unknown key": (P + "trainer:\n  sed: 1\n", "{file}: there is no setting trainer.sed. Did you mean trainer.seed?"),
    "unknown section": (P + "trianer:\n  seed: 1\n", "{file}: there is no setting trianer. Did you mean trainer?"),
    "wrong type": (P + "trainer:\n  seed: foo\n", "{file}: trainer.seed: Value 'foo' of type 'str' could not be"),
    "value for a section": (P + "trainer: 5\n", "{file}: trainer: 5: trainer is a section"),
    "value for a section in a section": (P + "actor:\n  optim: 1e-6\n", "{file}: actor.optim: 1e-6: actor.optim is a"),
    "a list without brackets": (
        P + "actor:\n  optim:\n    betas: 0.9, 0.95\n",
        "{file}: actor.optim.betas: 0.9, 0.95: must be a list such as [0.9, 0.95]. Write `betas: [0.9, 0.95]`.",
    ),
    "a list": (P + "- 5\n", "{file}: contains a list, not a mapping of settings. Write each section"),
    "a list without a package line": ("- 5\n", "{file}: contains a list, not a mapping of settings."),
    "a number": (P + "42\n", "{file}: contains one value, not a mapping of settings."),
    "a text": (P + "trainer.seed=3\n", "{file}: contains one value, not a mapping of settings."),
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
    error = command_error(capsys, "--config-dir", str(user_dir), "recipes=mine")
    assert error.startswith(message.format(file=file))
    assert "\n" not in error


def test_a_recipe_with_a_bundled_name_is_rejected(capsys, user_dir):
    file = user_dir / "recipes" / "offline.yaml"
    file.write_text(P)
    error = command_error(capsys, "--config-dir", str(user_dir), "recipes=offline")
    assert error.startswith(f"{file}: recipes=offline already means {RECIPES['offline']}")


def test_a_recipe_outside_the_recipes_folder_gets_a_hint(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(GLOBAL_PACKAGE)
    for argv in (["recipes=mine"], ["--config-dir", ".", "recipes=mine"]):
        error = command_error(capsys, *argv)
        assert (
            f"There is {tmp_path}/mine.yaml: move it into {tmp_path}/recipes, and add --config-dir {tmp_path}." in error
        )
    (tmp_path / "recipes").mkdir()
    (tmp_path / "mine.yaml").rename(tmp_path / "recipes" / "mine.yaml")
    error = command_error(capsys, "recipes=mine")
    assert f"There is one in {tmp_path}/recipes: add --config-dir {tmp_path}." in error


def test_compose_config_raises_user_errors_only():
    with pytest.raises(UserError, match="there is no setting"):
        compose("trainer.nproq=2")
