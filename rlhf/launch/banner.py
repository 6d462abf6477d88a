"""Writes the banner of a run: the model, the data, the devices and the run directory. Imports no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import rlhf
from rlhf.config import Config
from rlhf.config.derived import needs_reference
from rlhf.config.rules.lora_rules import suggested_rate
from rlhf.config.rules.validate import number_of_ranks
from rlhf.models.parameter_count import count_parameters, short_number
from rlhf.planning.check import plan_of
from rlhf.planning.device_defaults import Machine
from rlhf.planning.plan_text import plan_line
from rlhf.storage.layout import POINTER, RUN_LOG, scan, step_of

_COUNTED_BYTES = 32 << 20


def banner(config: Config, recipes: Sequence[str]) -> str:
    """Return the banner. The ranks log the numbers that only they can count, such as the prompts of a Hub data set."""
    t = config.trainer
    rows = [
        ("model", _model(config)),
        ("prompts", _prompts(config)),
        ("step", _step(config)),
        ("steps", _length(config)),
        ("device", _device(config)),
        *_adapters(config),
        *_memory(config),
        *_idle(config),
        ("run", f"{_relative(config.run_dir)} ({_beginning(config)})"),
        ("log", _relative(config.run_dir / RUN_LOG)),
    ]
    named = f"recipe {', '.join(recipes)}" if recipes else "no recipe"
    title = f"rlhf {rlhf.__version__}, {named}: {config.algorithm.adv_estimator}, seed {t.seed}"
    return "\n".join([title, *(f"  {name:<8} {value}" for name, value in rows)])


def _model(config: Config) -> str:
    models = [(config.model.path, config.model.revision, "")]
    if config.critic.path is not None and config.critic.path != config.model.path:
        models.append((config.critic.path, None, "critic "))
    if config.reward_model.path is not None:
        models.append((config.reward_model.path, config.reward_model.revision, "reward model "))
    parts = []
    kept = [("reference", config.ref.fsdp_config)] if needs_reference(config.actor, config.algorithm) else []
    kept += [("reward model", config.reward_model.fsdp_config)] if config.reward_model.path is not None else []
    for path, revision, role in models:
        count = count_parameters(path, revision)
        parts.append(f"{role}{_relative(path)}" + (f" ({short_number(count)} parameters)" if count is not None else ""))
    parts += [f"{role} kept in {c.model_dtype}" for role, c in kept if c.model_dtype == "bfloat16"]
    return ", ".join(parts)


def _prompts(config: Config) -> str:
    data = config.data
    if data.train_files is None:
        task = data.reasoning_gym
        return f"reasoning-gym's {task.task}: {task.train_size:,} and {task.val_size:,} held-out"
    return _files(data.train_files) + (f", held-out {_files(data.val_files)}" if data.val_files is not None else "")


def _files(files: str | Sequence[str]) -> str:
    names = [files] if isinstance(files, str) else list(files)
    count = _lines(names)
    shown = ", ".join(map(_relative, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    where = "the file" if len(names) == 1 else "the files"
    return shown if count is None else f"{shown} ({count:,} in {where})"


def _lines(names: Sequence[str]) -> int | None:
    """Return the number of non-empty lines; None if a file is not JSONL or the total size exceeds _COUNTED_BYTES."""
    paths = [Path(name).expanduser() for name in names]
    if not all(path.suffix == ".jsonl" and path.is_file() for path in paths):
        return None
    if sum(path.stat().st_size for path in paths) > _COUNTED_BYTES:
        return None
    return sum(bool(line.strip()) for path in paths for line in path.read_bytes().split(b"\n"))


def _step(config: Config) -> str:
    data = config.data
    return (
        f"{data.train_batch_size:,} prompts, {config.rollout.n} samples each, up to {data.max_response_length:,} tokens"
    )


def _length(config: Config) -> str:
    t, data = config.trainer, config.data
    if t.total_training_steps is not None:
        return f"{t.total_training_steps:,}"
    epochs = "1 epoch" if t.total_epochs == 1 else f"{t.total_epochs:,} epochs"
    prompts: int | None = data.reasoning_gym.train_size
    if data.train_files is not None:
        prompts = _lines([data.train_files] if isinstance(data.train_files, str) else data.train_files)
    if prompts is None or data.custom_cls.spec is not None:
        return epochs
    prompts = min(prompts, data.train_max_samples or prompts)
    return f"{epochs}, at most {max(1, t.total_epochs * prompts // data.train_batch_size):,}"


def _device(config: Config) -> str:
    t, machine, count = config.trainer, Machine.here(), number_of_ranks(config)[0]
    ranks, device = "1 rank" if count == 1 else f"{count:,} ranks", t.device
    if not machine.is_cuda(t.device):
        if t.device == "auto":
            device = "cpu (no GPU here)"
        return f"{device}, {ranks}, backend {config.backend.name}, rollout {config.rollout.name}"
    gpus = "1 GPU here" if machine.gpus == 1 else f"{machine.gpus} GPUs here"
    precision = "float32" if config.backend.autocast == "none" else str(config.backend.autocast)
    precision += " and TF32" if t.tf32 else ""
    vllm = f" ({machine.vllm_problem})" if config.rollout.name == "embedded" and machine.vllm_problem else ""
    rollout = f"rollout {config.rollout.name} in {config.rollout.dtype}{vllm}"
    return f"cuda ({gpus}), {ranks}, {precision}, backend {config.backend.name}, {rollout}"


def _memory(config: Config) -> Iterator[tuple[str, str]]:
    if (found := plan_of(config)) is not None:
        yield "memory", plan_line(found[1])


def _adapters(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a row about the adapters. The row suggests a learning rate if `lr` is the default for whole models."""
    lora = config.model.lora
    if not lora.enabled:
        return
    targets = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)
    rate = suggested_rate(config)
    hint = (
        ""
        if rate is None
        else f"; actor.optim.lr={config.actor.optim.lr:g} is the default for training all weights, try {rate:g}"
    )
    yield "lora", f"rank {lora.rank} on {targets}, base weights frozen{hint}"


def _idle(config: Config) -> Iterator[tuple[str, str]]:
    ranks, samples = number_of_ranks(config)[0], config.actor.ppo_mini_batch_size * config.rollout.n
    if ranks > samples:
        yield "idle", f"{ranks - samples:,} of {ranks:,} ranks in each mini-batch, which has {samples:,} samples"


def _relative(path: str | Path) -> str:
    """Return a path relative to the working directory if the path is inside, otherwise unchanged."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)


def _beginning(config: Config) -> str:
    """Return how the run begins, from the names of checkpoints alone. The ranks verify the checkpoint later."""
    t, found = config.trainer, next(iter(scan(config.run_dir)), None)
    if t.overwrite:
        return "new" if found is None else "new: the present content is deleted"
    if found is not None:
        step = step_of(found)
        return f"finished at step {step}" if step == t.total_training_steps else f"resumed at step {step}"
    if t.resume_mode == "resume_path":
        return f"begins with {t.resume_from_path}"
    lost = config.checkpoint.remote is None and (config.run_dir / POINTER).is_file()
    return f"no checkpoint found, although {POINTER} exists" if lost else "new"
