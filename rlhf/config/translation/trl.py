"""Converts settings of TRL's GRPOConfig and script arguments whose values mean something else here (TRL 1.16)."""

import math
from typing import Any

from rlhf.config.translation.recipe import NO_DUAL_CLIP, Recipe, Theirs
from rlhf.config.translation.verl import set_loggers, set_sleep

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
}
"""Maps TRL's loss types that differ only in the aggregation of token losses to our `actor.loss_agg_mode`."""
ENTRIES = ("dr_grpo", "cispo", "sapo")
"""TRL's loss types that are entries of our group `algorithm`, under the same names."""
REWARDS = {"accuracy_reward": "math_verify"}
"""Maps TRL's own reward functions to ours."""


UNSET_PROMPT = 512
"""Value of `data.max_prompt_length` in a recipe for TRL, which has no such limit."""


def convert(theirs: Theirs, recipe: Recipe) -> None:
    """Move the settings that need a conversion from `theirs` to `recipe`."""
    recipe.groups |= {"model": "hf", "data": "files"}
    _loss(theirs, recipe)
    _kl(theirs, recipe)
    _batches(theirs, recipe)
    _rewards(theirs, recipe)
    _engine(theirs, recipe)
    _reference(theirs, recipe)
    _adapters(theirs, recipe)
    _trainer(theirs, recipe)


def _loss(theirs: Theirs, recipe: Recipe) -> None:
    kind, level = theirs.text("loss_type"), theirs.text("importance_sampling_level")
    if level == "sequence":
        recipe.groups["algorithm"] = "gspo"
        if kind in ("grpo", "dapo"):
            recipe.set("actor.loss_agg_mode", AGGREGATIONS[kind], "loss_type")
        else:
            why = "importance_sampling_level=sequence selects algorithm=gspo, which has its own loss."
            recipe.lose("loss_type", kind, why)
    elif kind in ENTRIES:
        recipe.groups["algorithm"] = kind
    else:
        recipe.groups["algorithm"] = "grpo"
        if kind in AGGREGATIONS:
            recipe.set("actor.loss_agg_mode", AGGREGATIONS[kind], "loss_type")
        else:
            why = "there is no such loss here, so the recipe has algorithm=grpo; algorithm=NAME selects another."
            recipe.lose("loss_type", kind, why)
    _clips(theirs, recipe)
    scale = theirs.take("scale_rewards")
    recipe.set("algorithm.norm_adv_by_std_in_grpo", scale not in (False, "none"), "scale_rewards")
    if scale not in (False, "none", True, "group"):
        recipe.lose("scale_rewards", scale, "only the group's standard deviation scales rewards.")
    if level not in (None, "token", "sequence"):
        recipe.lose("importance_sampling_level", level, "must be token or sequence.")
    ceiling = theirs.take("delta")
    if recipe.groups["algorithm"] in ("grpo", "dr_grpo"):
        recipe.set("actor.clip_ratio_c", NO_DUAL_CLIP if ceiling is None else ceiling, "delta")
    elif ceiling is not None:
        recipe.lose("delta", ceiling, "only actor.policy_loss.loss_mode=vanilla has a dual clip.")


def _clips(theirs: Theirs, recipe: Recipe) -> None:
    low, high = theirs.number("epsilon"), theirs.number("epsilon_high")
    high = low if high is None else high
    if recipe.groups["algorithm"] != "cispo":
        recipe.set("actor.clip_ratio_low", low, "epsilon")
        recipe.set("actor.clip_ratio_high", high, "epsilon_high")
    elif high >= 1:  # for cispo, TRL's bound is that of the ratio itself, and there is no lower bound
        recipe.set("actor.clip_ratio_high", round(high - 1, 9), "epsilon_high")
    else:
        why = "TRL's cispo bounds the weight by epsilon_high; here, the bound 1 + actor.clip_ratio_high is at least 1."
        recipe.lose("epsilon_high", high, why)


def _kl(theirs: Theirs, recipe: Recipe) -> None:
    beta = theirs.number("beta")
    recipe.set("actor.use_kl_loss", bool(beta), "beta")
    if beta:
        recipe.set("actor.kl_loss_coef", beta, "beta")
    else:
        recipe.needless += theirs.drop("use_bias_correction_kl")


def _batches(theirs: Theirs, recipe: Recipe) -> None:
    """Set the batch sizes. A step's samples are `generation_batch_size`, or else samples per device * devices *
    (`steps_per_generation`, or else the accumulation). A step's prompts are these samples / samples per prompt. TRL
    counts optimizer steps; here a training step has all optimizer steps of its samples."""
    samples = theirs.number("per_device_train_batch_size", least=1)
    of_prompt = theirs.number("num_generations", least=1)
    accumulated = theirs.number("gradient_accumulation_steps", least=1)
    given = theirs.number("num_processes", least=1)
    devices = given or 1
    per_update = samples * accumulated * devices
    generated = theirs.number("generation_batch_size", least=1)
    steps = theirs.number("steps_per_generation", least=1)
    per_step = generated or samples * devices * (steps or accumulated)
    if generated and steps:
        recipe.lose("steps_per_generation", steps, "generation_batch_size already sets the size of a generation.")
    iterations = theirs.left.get("num_iterations")  # `_by_name` reports another value
    _count_training_steps(
        theirs, max(1, per_step // per_update) * max(iterations if isinstance(iterations, int) else 1, 1)
    )
    name = "per_device_train_batch_size"
    if per_step % of_prompt or per_update % of_prompt:
        wrong = per_step if per_step % of_prompt else per_update
        recipe.lose(name, samples, f"{wrong} samples are not a multiple of num_generations={of_prompt}.")
    recipe.set("rollout.n", of_prompt, "num_generations")
    recipe.set("data.train_batch_size", max(1, per_step // of_prompt), name)
    recipe.set("actor.ppo_mini_batch_size", max(1, min(per_step, per_update) // of_prompt), name)
    response, prompt = theirs.number("max_completion_length"), theirs.number("max_prompt_length")
    recipe.set("data.max_response_length", response, "max_completion_length")
    if prompt is not None:
        recipe.set("data.max_prompt_length", prompt, "max_prompt_length")
        recipe.set("data.overlong_prompts", "left", "max_prompt_length")
    else:
        recipe.set("data.max_prompt_length", UNSET_PROMPT, "max_prompt_length")
        recipe.set("data.overlong_prompts", "error", "max_prompt_length")
        why = (
            "TRL neither drops nor shortens prompts. With the recipe, a run stops at a prompt that is longer than "
            "data.max_prompt_length: set it to the length of your longest prompt."
        )
        recipe.lose("max_prompt_length", None, why)
    recipe.set("actor.ppo_max_token_len_per_gpu", samples * (response + (prompt or UNSET_PROMPT)), name)
    if given is None:
        why = (
            "the batch sizes are for one device. Multiply data.train_batch_size and actor.ppo_mini_batch_size by your "
            "number of devices."
        )
        recipe.lose("num_processes", None, why)
    else:
        machines = theirs.left.get("num_machines")
        machines = machines if isinstance(machines, int) and machines > 0 else 1
        recipe.set("trainer.nproc", max(1, given // machines), "num_processes")


def _count_training_steps(theirs: Theirs, updates: int) -> None:
    """Convert the numbers of optimizer steps in `theirs` to training steps with `updates` optimizer steps each."""
    if theirs.left.get("sync_ref_model"):
        theirs.left.setdefault("ref_model_sync_steps", 512)  # TRL's default
    for name in ("max_steps", "save_steps", "eval_steps", "ref_model_sync_steps"):
        value = theirs.left.get(name)
        if isinstance(value, int) and value > 0 and isinstance(updates, int):
            theirs.left[name] = math.ceil(value / updates)


def _rewards(theirs: Theirs, recipe: Recipe) -> None:
    model = theirs.text("reward_model_name_or_path")
    names = theirs.texts("reward_funcs")
    ours = []
    for name in names:
        if name in REWARDS:
            ours.append(REWARDS[name])
        else:
            why = "write 'reward.functions=[FILE.py:NAME]', with the file of this function."
            recipe.lose("reward_funcs", name, why)
    if model:
        recipe.set("reward_model.path", model, "reward_model_name_or_path")
        ours.append("reward_model")
    if ours:
        recipe.set("reward.functions", ours, "reward_funcs")
    elif not names:
        recipe.lose("reward_funcs", None, "set reward.functions.")


def _engine(theirs: Theirs, recipe: Recipe) -> None:
    if not theirs.take("use_vllm"):
        recipe.groups["rollout"] = "embedded"
        recipe.needless += theirs.take_section("vllm_")
        return
    mode = theirs.text("vllm_mode")
    if mode == "colocate":
        recipe.groups["rollout"] = "vllm"
        set_sleep(theirs.take("vllm_enable_sleep_mode"), "vllm_enable_sleep_mode", recipe)
        recipe.needless += theirs.take_section("vllm_server_")
    else:
        recipe.groups["rollout"] = "vllm_server"
        recipe.needless += theirs.drop("vllm_enable_sleep_mode")
        url = theirs.take("vllm_server_base_url")
        host, port = theirs.take("vllm_server_host"), theirs.take("vllm_server_port")
        if url or host or port:
            address = url or f"http://{host or '0.0.0.0'}:{port or 8000}"
            recipe.set("rollout.servers.urls", [address], "vllm_server_base_url")
    if mode not in ("colocate", "server"):
        recipe.lose("vllm_mode", mode, "must be colocate or server.")
    _correction(theirs, recipe)


def _correction(theirs: Theirs, recipe: Recipe) -> None:
    section = "algorithm.rollout_correction."
    corrects = theirs.take("vllm_importance_sampling_correction")
    if not isinstance(corrects, bool):
        recipe.lose("vllm_importance_sampling_correction", corrects, "must be true or false.")
    if corrects is False:
        recipe.needless += theirs.take_section("vllm_importance_sampling_")
        return
    mode = str(theirs.text("vllm_importance_sampling_mode"))
    cap = theirs.take("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    level, _, how = mode.partition("_")
    recipe.set(f"{section}rollout_is", level, "vllm_importance_sampling_mode")
    recipe.set(f"{section}rollout_is_threshold", cap, "vllm_importance_sampling_cap")
    if how == "mask":
        why = (
            "here, weights above the threshold are truncated, not masked. With "
            f"{section}rollout_is_threshold_lower, weights outside of both thresholds become 0."
        )
        recipe.lose("vllm_importance_sampling_mode", mode, why)


def _reference(theirs: Theirs, recipe: Recipe) -> None:
    synced = theirs.take("sync_ref_model")
    if not synced:
        recipe.needless += theirs.drop("ref_model_mixup_alpha", "ref_model_sync_steps")
    else:
        alpha, steps = theirs.take("ref_model_mixup_alpha"), theirs.take("ref_model_sync_steps")
        recipe.set("ref.update_freq", steps, "ref_model_sync_steps")
        recipe.set("ref.alpha", 0.6 if alpha is None else alpha, "ref_model_mixup_alpha")


def _adapters(theirs: Theirs, recipe: Recipe) -> None:
    """Set the adapters. The settings are TRL's ModelConfig's, whose defaults apply only with `use_peft`."""
    names = {"lora_r": ("rank", 16), "lora_alpha": ("alpha", 32), "lora_dropout": ("dropout", 0.05)}
    if not theirs.take("use_peft"):
        of_peft = ("lora_", "peft_config.", "lora_config.")
        for name in [
            each for each in theirs.left if each.startswith(of_peft) or each in ("r", "use_rslora", "use_dora")
        ]:
            value = theirs.take(name)
            if value not in (None, False):
                recipe.lose(name, value, "TRL trains adapters only with use_peft=true.")
        return
    recipe.set("model.lora.enabled", True, "use_peft")
    for name, (leaf, default) in names.items():
        value = theirs.number(name)
        recipe.set(f"model.lora.{leaf}", default if value is None else value, name)
    layers = theirs.take("lora_target_modules")
    if not layers:
        why = (
            "peft chooses the layers by the model's architecture; the recipe has all-linear. For the same layers, set "
            "model.lora.target_modules."
        )
        recipe.lose("lora_target_modules", layers, why)
    elif layers == ["all-linear"]:
        recipe.set("model.lora.target_modules", "all-linear", "lora_target_modules")
    else:
        kept = layers == "all-linear" or isinstance(layers, list)
        recipe.set("model.lora.target_modules", layers if kept else [layers], "lora_target_modules")


def _trainer(theirs: Theirs, recipe: Recipe) -> None:
    set_loggers(theirs.texts("report_to"), "report_to", recipe)
    for name in ("accelerate_config", "config_file"):
        if (file := theirs.take(name)) is not None:
            why = "accelerate's file is not read. Add its num_processes, num_machines and mixed_precision to this file."
            recipe.lose(name, file, why)
    steps = theirs.number("max_steps")
    if steps is not None and steps > 0:
        recipe.set("trainer.total_training_steps", steps, "max_steps")
    if (strategy := theirs.text("eval_strategy")) in (None, "no"):
        recipe.needless += theirs.drop("eval_steps", "num_generations_eval")
        recipe.set("trainer.test_freq", 0, "eval_strategy")
    else:
        _evaluation(theirs, recipe)
        if strategy == "epoch":
            recipe.lose("eval_strategy", strategy, "trainer.test_freq counts steps.")
    saves = theirs.text("save_strategy")
    if saves == "no":
        recipe.needless += theirs.drop("save_steps")
        recipe.set("trainer.save_freq", 0, "save_strategy")
    elif saves not in (None, "steps"):
        recipe.needless += theirs.drop("save_steps")
        recipe.lose("save_strategy", saves, "trainer.save_freq counts steps.")
    _precision(theirs, recipe)
    _optimizer(theirs, recipe)
    name = theirs.text("dataset_name")
    if name is not None:
        split, subset = theirs.text("dataset_train_split"), theirs.text("dataset_config")
        recipe.set(
            "data.train_files", f"{name}" + (f":{subset}" if subset else "") + f"@{split or 'train'}", "dataset_name"
        )


def _evaluation(theirs: Theirs, recipe: Recipe) -> None:
    """Set the sampling of evaluations, which in TRL is the sampling of training."""
    n = theirs.number("num_generations_eval")
    recipe.set("rollout.val_kwargs.n", n or recipe.settings.get("rollout.n"), "num_generations_eval")
    for name, default in (("temperature", 1.0), ("top_p", None), ("top_k", None), ("min_p", None)):
        value = theirs.left.get(name, default)
        recipe.set(f"rollout.val_kwargs.{name}", default if value is None else value, name)
    recipe.set("rollout.val_kwargs.repetition_penalty", theirs.left.get("repetition_penalty"), "repetition_penalty")


def _precision(theirs: Theirs, recipe: Recipe) -> None:
    half = {name: theirs.take(name) for name in ("bf16", "fp16")}
    if half["fp16"]:
        recipe.lose("fp16", True, "backend.autocast is bfloat16 or none.")
    else:
        names = {True: "bfloat16", False: "none"}
        value = names[half["bf16"]] if isinstance(half["bf16"], bool) else half["bf16"]
        recipe.set("backend.autocast", value, "bf16")


def _optimizer(theirs: Theirs, recipe: Recipe) -> None:
    first, second = theirs.take("adam_beta1"), theirs.take("adam_beta2")
    if first is not None or second is not None:
        recipe.set("actor.optim.betas", [_or(first, 0.9), _or(second, 0.999)], "adam_beta1")
    recipe.set("actor.optim.weight_decay", theirs.take("weight_decay"), "weight_decay")
    share = theirs.take("warmup_ratio")
    if share:
        recipe.lose("warmup_ratio", share, "set actor.optim.lr_warmup_steps to this share of the optimizer steps.")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
