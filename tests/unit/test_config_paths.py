"""Settings that name folders or addresses: models, checkpoints to resume from, remote copies."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from tests.support.configurations import make, problems


def test_resume_path_must_exist(tmp_path: Path):
    (tmp_path / "global_step_20").mkdir()
    wrong = str(tmp_path / "global_step_2")
    (line,) = problems(make(trainer__resume_mode="resume_path", trainer__resume_from_path=wrong))
    assert line.endswith(f"there is no such directory. Did you mean {tmp_path / 'global_step_20'}?")
    right = make(trainer__resume_mode="resume_path", trainer__resume_from_path=str(tmp_path / "global_step_20"))
    (line,) = problems(right)
    assert "has no manifest.json, so it is not a checkpoint" in line
    (tmp_path / "global_step_20" / "manifest.json").touch()
    validate(right, {})
    right.trainer.overwrite = True
    (line,) = problems(right)
    assert line.startswith("trainer.overwrite=true with trainer.resume_mode=resume_path")


def test_an_existing_run_does_not_need_its_resume_path_anymore(tmp_path: Path):
    config = make(trainer__resume_mode="resume_path", trainer__resume_from_path=str(tmp_path / "global_step_20"))
    config.trainer.default_local_dir = str(tmp_path)
    assert problems(config)
    config.run_dir.mkdir(parents=True)
    validate(config, {})


def test_remote_copies_lie_outside_of_the_run_directory(tmp_path: Path):
    config = make(trainer__default_local_dir=str(tmp_path / "runs"))
    for folder in (tmp_path / "runs", config.run_dir, config.run_dir / "copies", tmp_path / "runs" / "x" / ".."):
        config.checkpoint.remote = f"file://{folder}"
        [line] = problems(config)
        assert line.endswith(f"the copies would be inside the run directory, {config.run_dir}; set another folder.")
    config.checkpoint.remote = f"file://{tmp_path}/copies"
    validate(config, {})


def test_a_remote_needs_its_package(monkeypatch):
    monkeypatch.setattr("rlhf.config.rules.checkpoint_rules.find_spec", lambda name: None)
    [line] = problems(make(checkpoint__remote="s3://bucket/runs"))
    assert line == "checkpoint.remote=s3://bucket/runs: needs the package s3fs; run `pip install s3fs`."


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "qwen_small").mkdir()
    (tmp_path / "qwen_small" / "config.json").write_text("{}")
    (tmp_path / "readme.txt").write_text("")
    return tmp_path


def adapter(folder: Path) -> Path:
    (folder / "lora").mkdir(exist_ok=True)
    (folder / "lora" / "adapter_config.json").write_text("{}")
    return folder / "lora"


def checkpoint(run_dir: Path, *folders: str) -> Path:
    for folder in ("actor/model", *folders):
        (run_dir / "global_step_2" / folder).mkdir(parents=True)
    (run_dir / "global_step_2" / "manifest.json").write_text("{}")
    return run_dir / "global_step_2"


def exported(models: Path) -> Path:
    saved = checkpoint(models / "run", "actor/huggingface")
    (saved / "actor/huggingface/config.json").write_text("{}")
    return saved


EXPORT = "`python -m rlhf.checkpoint export {m}/run"
MODEL_PATHS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "misspelt": (lambda m: m / "qwen_smal", "there is no such folder. Did you mean {m}/qwen_small?"),
    "parent folder": (
        lambda m: m,
        "has no config.json, so it is not a model in Hugging Face format. Did you mean {m}/qwen",
    ),
    "adapter": (lambda m: adapter(m), "Hugging Face format. It contains a LoRA adapter: set "),
    "run": (lambda m: checkpoint(m / "run").parent, EXPORT + " DIR`"),
    "checkpoint": (lambda m: checkpoint(m / "run"), EXPORT + "/global_step_2 DIR`"),
    "part of a checkpoint": (lambda m: checkpoint(m / "run") / "actor", EXPORT + "/global_step_2 DIR`"),
    "exported checkpoint": (exported, "Did you mean {m}/run/global_step_2/actor/huggingface?"),
    "file": (lambda m: m / "readme.txt", "is a file; give the folder that contains config.json."),
}


@pytest.mark.parametrize("key", ["model", "critic", "reward_model"])
@pytest.mark.parametrize(("path", "message"), MODEL_PATHS.values(), ids=MODEL_PATHS.keys())
def test_local_model_path(models, path, message, key):
    wrong = path(models)
    settings = {"reward__functions": ["reward_model"], "reward_model__path": "org/judge", f"{key}__path": str(wrong)}
    (line,) = problems(make(**settings))
    assert line.startswith(f"{key}.path={wrong}: ")
    assert message.format(m=models) in line


def test_model_path_that_may_be_on_another_node(tmp_path):
    two_nodes = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for path in (tmp_path, tmp_path / "missing"):
        validate(make(model__path=str(path)), two_nodes)
        with pytest.raises(UserError):
            validate(make(model__path=str(path)), two_nodes | {"LOCAL_WORLD_SIZE": "2"})


def test_a_misspelt_relative_model_path_is_not_taken_for_a_hub_name(models, monkeypatch):
    monkeypatch.chdir(models.parent)
    validate(make(model__path=f"{models.name}/qwen_small"), {})
    (line,) = problems(make(model__path=f"{models.name}/qwen_smol"))
    assert "Did you mean" in line
    validate(make(model__path="Qwen/Qwen2.5-0.5B"), {})
