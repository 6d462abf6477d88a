"""Checks bounds, choices, and contradictions, which types cannot express. Reports all problems at once."""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.config import Config
from rlhf.config.derived import prompts_per_generation
from rlhf.config.known_settings import SETTINGS, Setting
from rlhf.config.names.hints import list_problems, value_hint
from rlhf.config.names.other_trainers import other_trainers
from rlhf.config.rules.algorithm_rules import algorithm_problems, correction_problems, entropy_problems, reward_problems
from rlhf.config.rules.backend_rules import backend_problems, missing_backend
from rlhf.config.rules.checkpoint_rules import checkpoint_problems
from rlhf.config.rules.env_rules import env_problems
from rlhf.config.rules.launcher_rules import launcher_problems, missing_ray
from rlhf.config.rules.learning_rules import kl_problems, loss_problems, optimizer_problems
from rlhf.config.rules.lora_rules import lora_problems, missing_peft
from rlhf.config.rules.path_rules import (
    model_problems,
    on_one_machine,
    overwritten_starts,
    resume_problems,
    unresolved_home_paths,
)
from rlhf.config.rules.rollout_rules import missing_engine, rollout_problems
from rlhf.config.rules.without_effect import without_effect
from rlhf.config.schema.tracking import ALERTS
from rlhf.config.user_functions import check_positional
from rlhf.errors import UserError

TEMPLATE_ARGUMENTS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
}
"""Arguments of transformers' `apply_chat_template` besides the template's own variables."""
CALLBACK_ARGUMENTS = ("step", "metrics")
LOGGERS = ("console", "jsonl", "mlflow", "tensorboard", "wandb")


def validate(
    config: Config, environ: Mapping[str, str] = os.environ, *, here: bool = True, models: bool = True
) -> None:
    """Check a resolved configuration. The number of ranks is `trainer.nnodes` times `trainer.nproc`, or WORLD_SIZE
    under torchrun.

    Args:
        here: also check that this installation has the required packages.
        models: also check that the models, and the checkpoint to start from, exist. False if other machines have them.

    Raises:
        UserError: with every problem, one per line, each with the setting, its value and the remedy.
    """
    problems = [p for setting in SETTINGS.values() if (p := out_of_bounds(setting, setting.value(config)))]
    problems += unresolved_home_paths(config)
    # Cross-field checks may divide by a value that is out of bounds.
    if not problems:
        for check in (
            _run,
            _callbacks,
            _batches,
            optimizer_problems,
            loss_problems,
            kl_problems,
            correction_problems,
            entropy_problems,
            reward_problems,
            rollout_problems,
            env_problems,
            _filter_groups,
            algorithm_problems,
            _data,
            backend_problems,
            checkpoint_problems,
            lora_problems,
            _rollback,
            overwritten_starts,
        ):
            problems += check(config)
        problems += resume_problems(config, exists=models)
        if here:
            problems += [*missing_engine(config), *missing_backend(config), *missing_peft(config), *missing_ray(config)]
        problems += model_problems(config, exist=models and on_one_machine(environ))
        problems += [*_ranks(config, environ), *launcher_problems(config, environ)]
        problems += _memory_replicas(config, environ)
    if problems:
        raise UserError("\n".join(problems))


def out_of_bounds(setting: Setting, value: Any) -> str | None:
    """Return why `value` is not finite, not one of the setting's choices or out of bounds; None if allowed."""
    rules = setting.metadata
    shown = f"{setting.key}={value}"
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{shown}: must be a finite number."
    if rules["choices"] and value not in rules["choices"]:
        return (
            f"{shown}: must be one of {', '.join(rules['choices'])}.{value_hint(setting.key, value, rules['choices'])}"
        )
    if rules["ge"] is not None and value < rules["ge"]:
        meant = other_trainers().minus_one.get(setting.key) if value == -1 else None
        instead = f"; {meant}" if meant else ""
        return f"{shown}: must be at least {rules['ge']}{instead}."
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
    yield from list_problems("trainer.logger", t.logger, LOGGERS)
    alerts = config.tracking.alerts
    yield from list_problems("tracking.alerts.kinds", alerts.kinds, ALERTS)
    if not alerts.command and alerts.webhook is None:
        keys = [f"tracking.alerts.{name}" for name in ("kinds", "first_step", "timeout_s")]
        yield from without_effect(config, keys, "tracking.alerts.command or tracking.alerts.webhook")


def _callbacks(config: Config) -> Iterator[str]:
    """Yield one line per callback that cannot take a step and its metrics, and per argument that no callback takes."""
    t, accepted, known = config.trainer, set[str](), True
    for spec in t.callbacks:
        try:
            names = check_positional("trainer.callbacks", spec, CALLBACK_ARGUMENTS, t.callback_kwargs)
        except UserError as error:
            yield str(error)
            names = None
        accepted |= set(names or ())
        known = known and names is not None
    if given := [name for name in t.callback_kwargs if name in CALLBACK_ARGUMENTS]:
        yield f"trainer.callback_kwargs={t.callback_kwargs}: the trainer passes {given[0]}. Use another name."
    for name in t.callback_kwargs if known else ():
        if name not in accepted:
            yield (
                f"trainer.callback_kwargs={t.callback_kwargs}: {name} is not a parameter of any of "
                f"trainer.callbacks={t.callbacks}. Correct or remove it."
            )


def _batches(config: Config) -> Iterator[str]:
    train, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    if train % mini:
        smaller = next(size for size in range(min(train, mini), 0, -1) if train % size == 0)
        yield (
            f"actor.ppo_mini_batch_size={mini} must divide data.train_batch_size={train}: set "
            f"actor.ppo_mini_batch_size={smaller} or data.train_batch_size={math.ceil(train / mini) * mini}."
        )


def number_of_ranks(config: Config, environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return the number of ranks of the run, and the name of its source."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return int(environ["WORLD_SIZE"]), "WORLD_SIZE of torchrun"
    if config.trainer.nnodes > 1:
        return config.trainer.nnodes * config.trainer.ranks, "trainer.nnodes times trainer.nproc"
    return config.trainer.ranks, "trainer.nproc"


def number_of_nodes(config: Config, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of machines of the run: torchrun's under torchrun, otherwise `trainer.nnodes`."""
    if "RANK" in environ and "LOCAL_WORLD_SIZE" in environ:
        return math.ceil(int(environ["WORLD_SIZE"]) / int(environ["LOCAL_WORLD_SIZE"]))
    return config.trainer.nnodes


def _memory_replicas(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    memory, nodes = config.checkpoint.memory, number_of_nodes(config, environ)
    if memory.freq and memory.replicas >= nodes > 1:
        yield (
            f"checkpoint.memory.replicas={memory.replicas}: the run has {nodes} nodes, and copies are on other nodes. "
            f"Set checkpoint.memory.replicas to at most {nodes - 1}."
        )
    elif memory.freq and memory.replicas and nodes == 1:
        yield (
            f"checkpoint.memory.replicas={memory.replicas}: copies are in the memory of other nodes, and the run has "
            "one node. Set checkpoint.memory.replicas=0, or trainer.nnodes to the number of nodes."
        )


def _ranks(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    ranks, source = number_of_ranks(config, environ)
    nnodes, local = config.trainer.nnodes, int(environ.get("LOCAL_WORLD_SIZE", ranks))
    if "RANK" in environ and nnodes > 1 and nnodes * local != ranks:
        yield (
            f"trainer.nnodes={nnodes}: torchrun or srun started {ranks} ranks, {local} of them on this machine. Start "
            f"them on {nnodes} machines, or remove trainer.nnodes: torchrun or srun sets the number of machines."
        )
    train, mini, n = config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n
    if ranks > 2 * mini * n:
        enough = math.ceil(ranks / (2 * n))
        divisor = next((size for size in range(enough, train + 1) if train % size == 0), None)
        remedy = f"set actor.ppo_mini_batch_size={divisor or enough}"
        remedy += "" if divisor else f" and data.train_batch_size={enough}"
        yield (
            f"actor.ppo_mini_batch_size={mini}: with rollout.n={n} a mini-batch has {mini * n} samples, so more than "
            f"half of the ranks ({source}={ranks}) would have nothing to train on: {remedy}, or use at most "
            f"{2 * mini * n} ranks."
        )
    yield from _indivisible(config, ranks, source)
    if config.launcher.name == "ray":
        for nodes in config.launcher.node_counts(nnodes)[:-1]:
            source = f"launcher.min_nodes={config.launcher.min_nodes} allows {nodes} times trainer.nproc"
            yield from _indivisible(config, nodes * config.trainer.ranks, source)


def _indivisible(config: Config, ranks: int, source: str) -> Iterator[str]:
    """Yield one line per setting that does not divide the number of ranks, which `source` sets."""
    divisors = {"backend.dp_replicate": config.backend.replicas}
    if config.rollout.name == "vllm":
        divisors["rollout.tensor_model_parallel_size"] = config.rollout.tensor_model_parallel_size
    for key, value in divisors.items():
        if ranks % value:
            fitting = math.gcd(ranks, value)
            yield f"{key}={value} must divide the number of ranks ({source}={ranks}): set {key}={fitting}."


def _filter_groups(config: Config) -> Iterator[str]:
    filters, train, n = config.algorithm.filter_groups, config.data.train_batch_size, config.rollout.n
    if not filters.enable:
        yield from without_effect(config, ["data.gen_batch_size"], "algorithm.filter_groups.enable=true")
        return
    if n < 2:
        yield (
            f"rollout.n={n}: algorithm.filter_groups.enable=true drops prompts whose samples all have the same metric; "
            "set rollout.n to 2 or more."
        )
    most = prompts_per_generation(config.data, filters) * filters.max_num_gen_batches
    if most < train:
        yield (
            f"data.gen_batch_size={config.data.gen_batch_size}: with "
            f"algorithm.filter_groups.max_num_gen_batches={filters.max_num_gen_batches} a step has at most {most} "
            f"prompts, fewer than data.train_batch_size={train}: set data.gen_batch_size={train}."
        )


def _data(config: Config) -> Iterator[str]:
    for key in ("train_files", "val_files"):
        files = getattr(config.data, key)
        names = [files] if isinstance(files, str) else files
        if names is not None and not (
            isinstance(names, list) and names and all(isinstance(n, str) and n for n in names)
        ):
            none = "; null for none" if key == "val_files" else ""
            yield f"data.{key}={files!r}: set a file, a glob or a Hub name, or a list of these{none}."
    for key in TEMPLATE_ARGUMENTS & config.data.apply_chat_template_kwargs.keys():
        yield f"data.apply_chat_template_kwargs.{key} cannot be set: the trainer sets it. Remove it."
    custom = config.data.custom_cls
    if (custom.path is None) != (custom.name is None):
        path, name = custom.path or "null", custom.name or "null"
        yield f"data.custom_cls.path={path} and data.custom_cls.name={name}: set both, or neither."
    elif custom.spec is not None and not (str(custom.path).endswith(".py") and str(custom.name).isidentifier()):
        yield (
            f"data.custom_cls.path={custom.path} and data.custom_cls.name={custom.name}: set a Python file (.py), and "
            "the name of a function or class in it."
        )
    if config.data.train_files is None and config.data.val_files is None:
        yield from without_effect(config, ["data.custom_cls.path", "data.last_turn_as_answer"], "data.train_files")
    if config.data.cache_dir == "":
        yield "data.cache_dir='': set a folder for tokenized prompts, or null for the default."


def _rollback(config: Config) -> Iterator[str]:
    if config.guards.action != "rollback":
        return
    for key in ("contents", "load_contents"):
        contents = getattr(config.checkpoint, key)
        lacking = [name for name in ("model", "optimizer", "extra") if contents is not None and name not in contents]
        if lacking:
            yield (
                f"checkpoint.{key}={contents}: guards.action=rollback needs checkpoints with model, optimizer and "
                f"extra; add {', '.join(lacking)}, or set guards.action=skip."
            )
    if config.trainer.save_freq == 0:
        yield (
            "trainer.save_freq=0: guards.action=rollback would return to the start of the run; set "
            "trainer.save_freq=20, or guards.action=skip."
        )
