"""Checks settings that name files, models and the source of a run."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf.config import Config
from rlhf.config.derived import needs_reward_model
from rlhf.config.known_settings import SETTINGS
from rlhf.config.overrides import hydra_value
from rlhf.config.rules.without_effect import without_effect
from rlhf.config.same_files import PATHS
from rlhf.config.schema.reward import REWARD_MODEL
from rlhf.errors import did_you_mean, nearby

INITIAL_WEIGHTS = ("model.path", "model.lora.path", "critic.path", "reward_model.path")
"""Settings that name the initial weights of a run."""


def unresolved_home_paths(config: Config) -> Iterator[str]:
    """Yield one line per path with `~USER` of an unknown user."""
    for key in (*PATHS, "model.lora.path", "trainer.resume_from_path"):
        value = SETTINGS[key].value(config)
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name.startswith("~") and os.path.expanduser(name).startswith("~"):  # noqa: PTH111
                yield f"{key}={name}: there is no user {name.split('/')[0]!r} here; write the path without ~."


def overwritten_starts(config: Config) -> Iterator[str]:
    """Yield one line per initial model in the run directory that `trainer.overwrite` would delete."""
    for key in INITIAL_WEIGHTS if config.trainer.overwrite else ():
        name = SETTINGS[key].value(config)
        start = None if not name else Path(name).expanduser().resolve()
        if start is not None and start.is_dir() and start.is_relative_to(config.run_dir.resolve()):
            yield (
                f"trainer.overwrite=true: would delete {key}={name}, which is in the run directory; set "
                "trainer.overwrite=false, and a new trainer.experiment_name for a new run."
            )


def resume_problems(config: Config, *, exists: bool) -> Iterator[str]:
    """Yield one line per resume source that is invalid or that the resume mode does not read. With `exists`, also check
    that the source is a checkpoint on this machine."""
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and not path:
        yield "trainer.resume_mode=resume_path: set trainer.resume_from_path to a global_step_N directory."
    if mode != "resume_path":
        yield from without_effect(config, ["trainer.resume_from_path"], "trainer.resume_mode=resume_path", mode)
    # The source of an existing run may be gone: the run resumes from its own checkpoints.
    if exists and mode == "resume_path" and path and not config.run_dir.exists():
        source = Path(path).expanduser()
        if not source.is_dir():
            yield f"trainer.resume_from_path={path}: there is no such directory.{nearby(source, Path.is_dir)}"
        elif not (source / "manifest.json").is_file():
            yield (
                f"trainer.resume_from_path={path}: has no manifest.json, so it is not a checkpoint; give a "
                "global_step_N directory."
            )
    if mode == "resume_path" and config.trainer.overwrite:
        yield (
            "trainer.overwrite=true with trainer.resume_mode=resume_path: may delete the checkpoint to start from; "
            "set trainer.overwrite=false, and a new trainer.experiment_name for a new run."
        )


def on_one_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether all ranks run on this machine. On several nodes, a model may exist only on another node."""
    return int(environ.get("WORLD_SIZE", "1")) == int(environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", "1")))


def model_problems(config: Config, *, exist: bool) -> Iterator[str]:
    """Yield one line per wrong name of a model, missing chat template and reward model without effect. With `exist`,
    also yield a line per missing model folder."""
    yield from model_folder_problems("model.path", config.model.path, exist)
    for key, optional in (("critic.path", config.critic.path), ("reward_model.path", config.reward_model.path)):
        if optional is not None:
            yield from model_folder_problems(key, optional, exist)
    if not needs_reward_model(config.reward):
        remedy = f"reward.functions={hydra_value([*config.reward.functions, REWARD_MODEL])}"
        yield from without_effect(config, ["reward_model.path"], f"{REWARD_MODEL} in reward.functions", remedy=remedy)
    template = config.model.chat_template
    if template is not None and not (file := Path(template).expanduser()).is_file():
        yield f"model.chat_template={template}: there is no such file.{nearby(file, Path.is_file)}"


_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_folder_problems(key: str, name: str, here: bool) -> Iterator[str]:
    """Yield a line if `name`, the value of `key`, is a file, or is neither a folder nor a possible Hub name. With
    `here`, also yield a line if the folder does not exist or has no config.json."""
    path = Path(name).expanduser()
    looks_local = name.startswith(("/", "./", "../", "~")) or ("/" in name and path.parent.is_dir())
    if not name:
        yield f"{key}='': set a folder in Hugging Face format or a Hub name."
    elif path.is_file():
        yield f"{key}={name}: is a file; give the folder that contains config.json."
    elif here and path.is_dir() and not (path / "config.json").is_file():
        why = "this folder has no config.json, so it is not a model in Hugging Face format."
        yield f"{key}={name}: {why}{_remedy(key, path)}"
    elif here and looks_local and not path.exists():
        yield f"{key}={name}: there is no such folder.{nearby(path, Path.is_dir)}"
    elif not looks_local and not path.exists() and not _HUB_NAME.fullmatch(name):
        unset = " The shell has not expanded the variable after the $." if "$" in name else ""
        yield f"{key}={name}: is neither a folder here nor a Hub name of the form org/name.{unset} Correct it."


def _remedy(key: str, path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return (
            f" It contains a LoRA adapter: set {key} to the base model, and add model.lora.enabled=true "
            f"model.lora.path={path}; or merge both with PEFT's merge_and_unload, and give the saved folder."
        )
    if inside := sorted([*path.glob("*/config.json"), *path.glob("*/huggingface/config.json")]):
        return did_you_mean(str(inside[0].parent))
    source = path.parent if (path.parent / "manifest.json").is_file() else path
    if [*source.glob("manifest.json"), *source.glob("global_step_*/manifest.json")]:
        return f" Write a model with `python -m rlhf.checkpoint export {source} DIR`, and set {key}=DIR."
    return " Set the folder that contains config.json."
