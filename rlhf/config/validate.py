"""The rules that types cannot express: bounds, choices, settings that must fit each other. All are told at once."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf.config import Config
from rlhf.config.checkpoint import CONTENTS
from rlhf.config.schema import SETTINGS, Setting, did_you_mean, nearest
from rlhf.errors import UserError

LOGGERS = ("console", "jsonl", "tensorboard", "wandb")


def validate(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Check a resolved configuration; the number of ranks is `trainer.nproc`, or WORLD_SIZE under torchrun.

    Raises:
        UserError: with every problem found, one per line, each naming the setting, its value and what to set.
    """
    problems = [p for setting in SETTINGS.values() if (p := _out_of_bounds(setting, config))]
    # Cross-field checks may divide by a value that is itself out of bounds.
    if not problems:
        for check in (_run, _batches, _optimizer, _rollout, _data, _checkpoint, _resume, _model):
            problems += check(config)
        problems += _ranks(config, environ)
    if problems:
        raise UserError("\n".join(problems))


def _out_of_bounds(setting: Setting, config: Config) -> str | None:
    value, rules = setting.value(config), setting.metadata
    shown = f"{setting.key}={value}"
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{shown}: must be a finite number."
    if rules["choices"] and value not in rules["choices"]:
        return f"{shown}: must be one of {', '.join(rules['choices'])}.{did_you_mean(nearest(value, rules['choices']))}"
    if rules["ge"] is not None and value < rules["ge"]:
        return f"{shown}: must be at least {rules['ge']}."
    if rules["gt"] is not None and value <= rules["gt"]:
        return f"{shown}: must be greater than {rules['gt']}."
    if rules["le"] is not None and value > rules["le"]:
        return f"{shown}: must be at most {rules['le']}."
    return None


def _run(config: Config) -> Iterator[str]:
    t = config.trainer
    for key in ("project_name", "experiment_name"):
        name = getattr(t, key)
        if name in ("", ".", "..") or any(c in "/\\" or not c.isprintable() for c in name):
            yield f"trainer.{key}={name!r}: must be a plain folder name, without slashes."
    if not t.default_local_dir:
        yield "trainer.default_local_dir='': name the folder for run directories, e.g. checkpoints."
    for name in t.logger:
        if name not in LOGGERS:
            near = did_you_mean(nearest(name, LOGGERS))
            yield f"trainer.logger={t.logger}: no tracker is called {name!r}; known: {', '.join(LOGGERS)}.{near}"
    if len(set(t.logger)) < len(t.logger):
        yield f"trainer.logger={t.logger}: name each tracker once."


def _batches(config: Config) -> Iterator[str]:
    train, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    if train % mini:
        yield (
            f"actor.ppo_mini_batch_size={mini} must divide data.train_batch_size={train}: "
            f"set actor.ppo_mini_batch_size={math.gcd(train, mini)} "
            f"or data.train_batch_size={math.ceil(train / mini) * mini}."
        )


def _ranks(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    if "RANK" in environ and "WORLD_SIZE" in environ:
        ranks, source = int(environ["WORLD_SIZE"]), "WORLD_SIZE of torchrun"
    else:
        ranks, source = config.trainer.nproc, "trainer.nproc"
    for key, size in (
        ("data.train_batch_size", config.data.train_batch_size),
        ("actor.ppo_mini_batch_size", config.actor.ppo_mini_batch_size),
    ):
        if size % ranks:
            fitting = math.ceil(size / ranks) * ranks
            yield f"{key}={size} must be divisible by the number of ranks ({source}={ranks}): set {key}={fitting}."


def _optimizer(config: Config) -> Iterator[str]:
    optim, steps = config.actor.optim, config.trainer.total_training_steps
    if len(optim.betas) != 2 or not all(0 <= b < 1 for b in optim.betas):
        yield f"actor.optim.betas={optim.betas}: must be two numbers, each at least 0 and less than 1."
    if config.actor.clip_ratio_low > 1:
        yield f"actor.clip_ratio_low={config.actor.clip_ratio_low}: must be at most 1; a ratio is never below 0."
    if steps is not None:
        updates = (
            steps * config.actor.ppo_epochs * max(config.data.train_batch_size // config.actor.ppo_mini_batch_size, 1)
        )
        if optim.lr_warmup_steps >= updates:
            yield (
                f"actor.optim.lr_warmup_steps={optim.lr_warmup_steps}: the run has {updates} optimizer steps "
                f"(trainer.total_training_steps={steps}); the warm-up must be shorter."
            )


def _rollout(config: Config) -> Iterator[str]:
    r = config.rollout
    if config.algorithm.adv_estimator == "grpo" and r.n < 2:
        yield f"rollout.n={r.n}: grpo compares the samples of one prompt; set rollout.n to 2 or more."
    if r.n > 1 and r.temperature == 0:
        yield (
            f"rollout.temperature=0: the {r.n} samples of a prompt (rollout.n) would be equal and teach nothing; "
            "set rollout.temperature=1.0. Evaluation has its own, rollout.val_kwargs.temperature."
        )
    if r.n > 1 and r.top_k == 1:
        yield f"rollout.top_k=1: the {r.n} samples of a prompt (rollout.n) would be equal; set rollout.top_k=-1."
    if "" in r.stop:
        yield f"rollout.stop={r.stop}: an empty stop string would end every sample at once."


def _data(config: Config) -> Iterator[str]:
    for key in ("train_files", "val_files"):
        files = getattr(config.data, key)
        names = [files] if isinstance(files, str) else files
        if names is not None and not (
            isinstance(names, list) and names and all(isinstance(n, str) and n for n in names)
        ):
            yield f"data.{key}={files!r}: set a file, a glob or a Hub name, or a list of these."


def _checkpoint(config: Config) -> Iterator[str]:
    saved, loaded = config.checkpoint.contents, config.checkpoint.load_contents
    resumes = config.trainer.resume_mode != "disable"
    for key, contents in (("contents", saved), ("load_contents", loaded or [])):
        for name in contents:
            if name not in CONTENTS:
                near = did_you_mean(nearest(name, CONTENTS))
                yield f"checkpoint.{key}={contents}: {name!r} is none of {', '.join(CONTENTS)}.{near}"
        if len(set(contents)) < len(contents):
            yield f"checkpoint.{key}={contents}: name each part once."
    # Whatever trainer.save_freq says: a run that is asked to stop saves.
    if not saved:
        yield f"checkpoint.contents=[]: nothing to save; name any of {', '.join(CONTENTS)}."
    elif resumes and not {"model", "hf_model"} & set(saved):
        yield (
            f"checkpoint.contents={saved}: without model or hf_model no run can resume; "
            "add model, or set trainer.resume_mode=disable."
        )
    if loaded is None:
        return
    if not {"model", "hf_model"} & set(loaded):
        yield f"checkpoint.load_contents={loaded}: needs model or hf_model; null reads what checkpoint.contents names."
    missing = [name for name in loaded if name in CONTENTS and name not in saved]
    if resumes and missing:
        yield (
            f"checkpoint.load_contents={loaded}: a resume would look for {', '.join(missing)}, which "
            f"checkpoint.contents={saved} does not save; make the two agree."
        )


def _resume(config: Config) -> Iterator[str]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and not path:
        yield "trainer.resume_mode=resume_path: set trainer.resume_from_path to a global_step_N directory."
    if mode != "resume_path" and path:
        yield f"trainer.resume_from_path={path}: has effect only with trainer.resume_mode=resume_path (it is {mode})."
    # Of a run that exists the source may be gone by now: it goes on from checkpoints of its own.
    if mode == "resume_path" and path and not config.run_dir.exists():
        source = Path(path).expanduser()
        if not source.is_dir():
            yield f"trainer.resume_from_path={path}: there is no such directory.{_sibling(source)}"
        elif not (source / "manifest.json").is_file():
            yield f"trainer.resume_from_path={path}: has no manifest.json, so it is no checkpoint: name a global_step_N directory."
    if mode == "resume_path" and config.trainer.overwrite:
        yield (
            "trainer.overwrite=true with trainer.resume_mode=resume_path: the one may delete what the other reads: "
            "set trainer.overwrite=false, and a new trainer.experiment_name for a new run."
        )


def _model(config: Config) -> Iterator[str]:
    name = config.model.path
    path = Path(name).expanduser()
    looks_local = name.startswith(("/", "./", "../", "~")) or ("/" in name and path.parent.is_dir())
    if not name:
        yield "model.path='': set a folder in Hugging Face format or a Hub name."
    elif path.is_file():
        yield f"model.path={name}: is a file; give the folder that holds config.json."
    elif path.is_dir() and not (path / "config.json").is_file():
        inside = sorted(p.parent for p in path.glob("*/config.json"))
        hint = did_you_mean(str(inside[0]) if inside else None)
        yield f"model.path={name}: this folder has no config.json, so it is no model in Hugging Face format.{hint}"
    elif looks_local and not path.exists():
        yield f"model.path={name}: there is no such folder.{_sibling(path)}"
    template = config.model.chat_template
    if template is not None and not Path(template).expanduser().is_file():
        yield f"model.chat_template={template}: there is no such file."


def _sibling(path: Path) -> str:
    """The folder next to a missing one with the most similar name, as the end of a message."""
    parent = path.parent
    found = nearest(path.name, [p.name for p in parent.iterdir() if p.is_dir()]) if parent.is_dir() else None
    return did_you_mean(str(parent / found) if found else None)
