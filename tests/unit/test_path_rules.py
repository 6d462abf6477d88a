"""Paths that cannot be looked up, and inputs in the run directory that trainer.overwrite=true would delete."""

from pathlib import Path

import pytest

from rlhf.config import Config, LoraConfig
from rlhf.config.rules.path_rules import model_folder_problems
from rlhf.config.rules.validate import validate
from tests.support.refusals import says, user_error


@pytest.mark.parametrize("key", ["model.path", "model.lora.path", "trainer.default_local_dir", "data.train_files"])
def test_a_path_in_the_home_of_an_unknown_user_is_rejected(key: str) -> None:
    config, name = Config(), "~nobody-of-this-name/here"
    config.model.path = config.data.train_files = "org/name"
    config.model.lora.enabled = True
    *sections, last = key.split(".")
    section = config
    for one in sections:
        section = getattr(section, one)
    setattr(section, last, [name] if key == "data.train_files" else name)
    expected = f"{key}={name}: there is no user '~nobody-of-this-name' here; write the path without ~."
    assert user_error(validate, config, {}) == expected


@pytest.mark.parametrize("overwrite", [True, False])
def test_overwrite_rejects_inputs_inside_the_run_directory(tmp_path: Path, overwrite: bool) -> None:
    config = Config()
    config.model.path = config.data.train_files = "org/name"
    config.trainer.default_local_dir, config.trainer.overwrite = str(tmp_path / "link"), overwrite
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    folder = config.run_dir / "global_step_4" / "actor" / "huggingface"
    folder.mkdir(parents=True)
    config.model.lora = LoraConfig(enabled=True, path=str(folder))
    if not overwrite:
        validate(config, {})
        return
    message = user_error(validate, config, {})
    assert f"trainer.overwrite=true: would delete model.lora.path={folder}, which is in the run directory" in message


def test_a_misspelt_path_suggests_the_nearest_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "policy").mkdir(parents=True)
    (tmp_path / "models" / "polici").write_text("a file")
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    for wrong in ("./models/polcy", "./modles/policy", f"{tmp_path}/modles/polcy"):
        (problem,) = model_folder_problems("model.path", wrong, True)
        says(problem, f"model.path={wrong}", "Did you mean", "models/policy?")
    (problem,) = model_folder_problems("model.path", "./nothing/like/it", True)
    says(problem, "Correct the path")
    config = Config()
    config.model.path = config.data.train_files = "org/name"
    config.model.chat_template = "templates.jinja"
    says(user_error(validate, config, {}), "model.chat_template=templates.jinja", "Did you mean template.jinja?")
