"""Rules that types cannot express: bounds, choices, settings that must fit each other. All are told at once."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from rlhf.config import BackendConfig, Config
from rlhf.config.algorithm_rules import algorithm_problems, correction_problems, entropy_problems, reward_problems
from rlhf.config.checkpoint_rules import checkpoint_problems
from rlhf.config.lora_rules import lora_problems, missing_peft
from rlhf.config.other_names import MINUS_ONE
from rlhf.config.path_rules import homeless_paths, overwritten_starts
from rlhf.config.rollout_rules import missing_engine, rollout_problems
from rlhf.config.schema import SETTINGS, Setting, value_hint
from rlhf.errors import UserError, did_you_mean, nearest

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
"""Arguments of transformers' `apply_chat_template` beside the template's own variables."""
LOGGERS = ("console", "jsonl", "tensorboard", "wandb")


def validate(config: Config, environ: Mapping[str, str] = os.environ, *, here: bool = True) -> None:
    """Check a resolved configuration; the number of ranks is `trainer.nproc`, or WORLD_SIZE under torchrun.

    Args:
        here: it is to run in this installation, which must have what it needs.

    Raises:
        UserError: with every problem found, one per line, each naming the setting, its value and what to set.
    """
    problems = [p for setting in SETTINGS.values() if (p := _out_of_bounds(setting, config))]
    problems += homeless_paths(config)
    # Cross-field checks may divide by a value that is itself out of bounds.
    if not problems:
        for check in (
            _run,
            _batches,
            _optimizers,
            _losses,
            _kl,
            correction_problems,
            entropy_problems,
            reward_problems,
            rollout_problems,
            _filter_groups,
            algorithm_problems,
            _data,
            _backend,
            checkpoint_problems,
            lora_problems,
            _rollback,
            _resume,
            overwritten_starts,
        ):
            problems += check(config)
        if here:
            problems += [*missing_engine(config), *_missing_backend(config), *missing_peft(config)]
        problems += _models(config, environ)
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
        return (
            f"{shown}: must be one of {', '.join(rules['choices'])}.{value_hint(setting.key, value, rules['choices'])}"
        )
    if rules["ge"] is not None and value < rules["ge"]:
        instead = f"; {MINUS_ONE[setting.key]}" if value == -1 and setting.key in MINUS_ONE else ""
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


def number_of_ranks(config: Config, environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Number of ranks of the run, and the name of what says so."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return int(environ["WORLD_SIZE"]), "WORLD_SIZE of torchrun"
    return config.trainer.ranks, "trainer.nproc"


def _ranks(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    ranks, source = number_of_ranks(config, environ)
    train, mini, n = config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n
    if ranks > 2 * mini * n:
        enough = math.ceil(ranks / (2 * n))
        fitting = next((size for size in range(enough, train + 1) if train % size == 0), None)
        more = f"set actor.ppo_mini_batch_size={fitting or enough}"
        more += "" if fitting else f" and data.train_batch_size={enough}"
        yield (
            f"actor.ppo_mini_batch_size={mini}: with rollout.n={n} a mini-batch has {mini * n} samples, so more than "
            f"half of the ranks ({source}={ranks}) would have nothing to train on: {more}, or take at most "
            f"{2 * mini * n} ranks."
        )
    replicas = config.backend.dp_replicate
    if ranks % replicas:
        yield (
            f"backend.dp_replicate={replicas} must divide the number of ranks ({source}={ranks}): "
            f"set backend.dp_replicate={math.gcd(ranks, replicas)}."
        )
    group = config.rollout.tensor_model_parallel_size
    if config.rollout.name == "vllm" and ranks % group:
        yield (
            f"rollout.tensor_model_parallel_size={group} must divide the number of ranks ({source}={ranks}): "
            f"set rollout.tensor_model_parallel_size={math.gcd(ranks, group)}."
        )


def _optimizers(config: Config) -> Iterator[str]:
    steps, warmup = config.trainer.total_training_steps, config.trainer.critic_warmup
    mini_batches = max(config.data.train_batch_size // config.actor.ppo_mini_batch_size, 1)
    if steps is not None and warmup >= steps:
        yield (
            f"trainer.critic_warmup={warmup}: the run has {steps} steps (trainer.total_training_steps); the policy "
            "would learn nothing."
        )
    for key, role, idle in (("actor", config.actor, warmup), ("critic", config.critic, 0)):
        optim = role.optim
        if len(optim.betas) != 2 or not all(0 <= b < 1 for b in optim.betas):
            yield f"{key}.optim.betas={optim.betas}: must be two numbers, each at least 0 and less than 1."
        if steps is None or steps <= idle:
            continue
        by_updates = optim.lr_scheduler_interval == "optimizer_step"
        scheduled = (steps - idle) * (role.ppo_epochs * mini_batches if by_updates else 1)
        if optim.lr_warmup_steps >= scheduled:
            unit = optim.lr_scheduler_interval.replace("_", " ")
            yield (
                f"{key}.optim.lr_warmup_steps={optim.lr_warmup_steps}: the run has {scheduled} {unit}s "
                f"(trainer.total_training_steps={steps}); the warm-up must be shorter."
            )


def _losses(config: Config) -> Iterator[str]:
    actor, buffer, longest = config.actor, config.reward.overlong_buffer, config.data.max_response_length
    if actor.shuffle and actor.ppo_mini_batch_size == config.data.train_batch_size:
        yield (
            f"actor.shuffle=true: a step is one mini-batch of all its prompts (actor.ppo_mini_batch_size="
            f"{actor.ppo_mini_batch_size}), the same in any order; set actor.shuffle=false, or a smaller "
            "actor.ppo_mini_batch_size."
        )
    if actor.clip_ratio_low > 1:
        yield f"actor.clip_ratio_low={actor.clip_ratio_low}: must be at most 1; a ratio is never below 0."
    policy_loss = actor.policy_loss
    if policy_loss.loss_mode == "clip_cov" and policy_loss.clip_cov_lb >= policy_loss.clip_cov_ub:
        yield (
            f"actor.policy_loss.clip_cov_lb={policy_loss.clip_cov_lb}: must be less than "
            f"actor.policy_loss.clip_cov_ub={policy_loss.clip_cov_ub}, or no token is between them."
        )
    norm = "seq-mean-token-sum-norm"
    if actor.loss_scale_factor is not None and norm not in (actor.loss_agg_mode, config.critic.loss_agg_mode):
        yield (
            f"actor.loss_scale_factor={actor.loss_scale_factor}: has effect only with actor.loss_agg_mode={norm} "
            f"(it is {actor.loss_agg_mode}) or critic.loss_agg_mode={norm}."
        )
    if buffer.enable and buffer.len >= longest:
        yield (
            f"reward.overlong_buffer.len={buffer.len}: must be less than data.max_response_length={longest}, of which "
            "it is the end: "
            f"set reward.overlong_buffer.len={max(longest // 5, 1)}, or reward.overlong_buffer.enable=false."
        )


def _kl(config: Config) -> Iterator[str]:
    control, actor = config.algorithm.kl_ctrl, config.actor
    if actor.use_bias_correction_kl and not actor.kl_in_loss:
        yield (
            "actor.use_bias_correction_kl=true: has effect only with a KL in the loss; set actor.use_kl_loss=true and "
            "actor.kl_loss_coef above 0."
        )
    if control.type != "adaptive":
        return
    if not config.algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.type=adaptive: has effect only with algorithm.use_kl_in_reward=true."
    elif control.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef=0: an adaptive coefficient is multiplied at each step, so 0 stays 0; "
            "set algorithm.kl_ctrl.kl_coef=0.001."
        )


def _filter_groups(config: Config) -> Iterator[str]:
    filters, train, n = config.algorithm.filter_groups, config.data.train_batch_size, config.rollout.n
    if not filters.enable:
        if config.data.gen_batch_size is not None:
            yield (
                f"data.gen_batch_size={config.data.gen_batch_size}: has effect only with "
                "algorithm.filter_groups.enable=true; "
                "set data.gen_batch_size=null."
            )
        return
    if n < 2:
        yield (
            f"rollout.n={n}: algorithm.filter_groups.enable=true drops prompts whose samples agree; set rollout.n to "
            "2 or more."
        )
    most = (config.data.gen_batch_size or train) * filters.max_num_gen_batches
    if most < train:
        yield (
            f"data.gen_batch_size={config.data.gen_batch_size}: with algorithm.filter_groups.max_num_gen_batches="
            f"{filters.max_num_gen_batches} a step has at most {most} prompts, fewer than "
            f"data.train_batch_size={train}: "
            f"set data.gen_batch_size={train}."
        )


def _data(config: Config) -> Iterator[str]:
    for key in ("train_files", "val_files"):
        files = getattr(config.data, key)
        names = [files] if isinstance(files, str) else files
        if names is not None and not (
            isinstance(names, list) and names and all(isinstance(n, str) and n for n in names)
        ):
            yield f"data.{key}={files!r}: set a file, a glob or a Hub name, or a list of these."
    for key in TEMPLATE_ARGUMENTS & config.data.apply_chat_template_kwargs.keys():
        yield f"data.apply_chat_template_kwargs.{key} cannot be set: the trainer decides it. Remove it."
    if config.data.cache_dir == "":
        yield "data.cache_dir='': name a folder for tokenised prompts, or set null for the one of Hugging Face."


def _backend(config: Config) -> Iterator[str]:
    backend = config.backend
    if backend.use_liger and config.actor.needs_entropy:
        yield (
            "backend.use_liger=true: Liger's kernel gives no entropy; set actor.calculate_entropy=false, "
            "actor.entropy_coeff=0 and actor.entropy_ctrl.type=fixed."
        )
    if config.trainer.tf32 and config.trainer.device == "cpu":
        yield "trainer.tf32=true: TF32 is a format of GPUs, but trainer.device=cpu; set it to false."
    if backend.use_liger and config.trainer.device == "cpu":
        yield "backend.use_liger=true: Liger's kernels are for GPUs, but trainer.device=cpu; set it to false."
    if backend.name != "deepspeed":
        for key in ("zero_stage", "offload_optimizer"):
            value = getattr(backend, key)
            if value != getattr(BackendConfig(), key):
                yield f"backend.{key}={value}: has effect only with backend=deepspeed (it is {backend.name})."
        return
    if backend.dp_replicate != 1:
        yield (
            f"backend.dp_replicate={backend.dp_replicate}: has effect only with backend=fsdp2 (it is {backend.name}); "
            "set backend.dp_replicate=1."
        )
    if backend.offload_optimizer and backend.zero_stage == 0:
        yield "backend.offload_optimizer=true: needs ZeRO; set backend.zero_stage=1, 2 or 3."
    for role, section in (("actor", config.actor), ("critic", config.critic)):
        if backend.offload_optimizer and section.fsdp_config.optimizer_offload:
            yield (
                f"{role}.fsdp_config.optimizer_offload=true: backend.offload_optimizer=true has the optimizer in the "
                "host's memory for good; set one of the two to false."
            )
    if backend.offload_optimizer and config.trainer.device == "cpu":
        yield (
            "backend.offload_optimizer=true: moves optimizer state from a GPU to the CPU, but trainer.device=cpu; "
            "set backend.offload_optimizer=false."
        )


def _liger_problem() -> str | None:
    try:
        found = version("liger-kernel")
    except PackageNotFoundError:
        return "liger-kernel is not installed"
    return None if Version(found) >= Version("0.8.5") else f"liger-kernel {found} is installed, 0.8.5 is needed"


def _missing_backend(config: Config) -> Iterator[str]:
    if config.backend.use_liger and (problem := _liger_problem()):
        yield f"backend.use_liger=true: {problem}; run `pip install 'rlhf[liger]'`, or set it to false."
    spec = find_spec("deepspeed")
    if config.backend.name == "deepspeed" and (spec is None or spec.origin is None):
        yield (
            "backend.name=deepspeed: DeepSpeed is not installed; run `pip install 'rlhf[deepspeed]'`, or set "
            "backend=fsdp2."
        )


def _rollback(config: Config) -> Iterator[str]:
    if config.guards.action != "rollback":
        return
    for key in ("contents", "load_contents"):
        contents = getattr(config.checkpoint, key)
        lacking = [name for name in ("model", "optimizer", "extra") if contents is not None and name not in contents]
        if lacking:
            yield (
                f"checkpoint.{key}={contents}: guards.action=rollback returns to a checkpoint as it was, which takes "
                "model, optimizer and "
                f"extra; add {', '.join(lacking)}, or set guards.action=skip."
            )
    if config.trainer.save_freq == 0:
        yield (
            "trainer.save_freq=0: guards.action=rollback would go back to the start; set trainer.save_freq=20, or "
            "guards.action=skip."
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
            yield (
                f"trainer.resume_from_path={path}: has no manifest.json, so it is no checkpoint: name a global_step_N "
                "directory."
            )
    if mode == "resume_path" and config.trainer.overwrite:
        yield (
            "trainer.overwrite=true with trainer.resume_mode=resume_path: the one may delete what the other reads: "
            "set trainer.overwrite=false, and a new trainer.experiment_name for a new run."
        )


def on_one_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks are here: under torchrun on several nodes a model's files may be on another one."""
    return int(environ.get("WORLD_SIZE", "1")) == int(environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", "1")))


def _models(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    here = on_one_machine(environ)
    yield from _model_folder("model.path", config.model.path, here)
    for key, optional in (("critic.path", config.critic.path), ("reward_model.path", config.reward_model.path)):
        if optional is not None:
            yield from _model_folder(key, optional, here)
    if config.reward_model.path is not None and "reward_model" not in config.reward.functions:
        yield (
            f"reward_model.path={config.reward_model.path}: has effect only with reward_model among reward.functions "
            f"(they are {', '.join(config.reward.functions)})."
        )
    template = config.model.chat_template
    if template is not None and not Path(template).expanduser().is_file():
        yield f"model.chat_template={template}: there is no such file."


_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def _model_folder(key: str, name: str, here: bool) -> Iterator[str]:
    path = Path(name).expanduser()
    looks_local = name.startswith(("/", "./", "../", "~")) or ("/" in name and path.parent.is_dir())
    if not name:
        yield f"{key}='': set a folder in Hugging Face format or a Hub name."
    elif path.is_file():
        yield f"{key}={name}: is a file; give the folder that holds config.json."
    elif here and path.is_dir() and not (path / "config.json").is_file():
        inside = sorted(p.parent for p in path.glob("*/config.json"))
        hint = did_you_mean(str(inside[0]) if inside else None)
        if (path / "adapter_config.json").is_file():
            hint = (
                " It holds an adapter (LoRA): name its base model there, and the adapter with model.lora.enabled=true "
                f"model.lora.path={name}; or merge the two with PEFT's merge_and_unload, and name what that saves."
            )
        yield f"{key}={name}: this folder has no config.json, so it is no model in Hugging Face format.{hint}"
    elif here and looks_local and not path.exists():
        yield f"{key}={name}: there is no such folder.{_sibling(path)}"
    elif not looks_local and not path.exists() and not _HUB_NAME.fullmatch(name):
        unset = " The shell has not replaced what follows the $." if "$" in name else ""
        yield f"{key}={name}: is neither a folder here nor a Hub name of the form org/name.{unset}"


def _sibling(path: Path) -> str:
    """The folder next to a missing one with the most similar name, as the end of a message."""
    parent = path.parent
    found = nearest(path.name, [p.name for p in parent.iterdir() if p.is_dir()]) if parent.is_dir() else None
    return did_you_mean(str(parent / found) if found else None)
