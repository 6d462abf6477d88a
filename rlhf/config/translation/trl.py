"""Converts settings of TRL's GRPOConfig and script arguments whose values mean something else here (TRL 1.16)."""

from typing import Any

from rlhf.config.translation.recipe import Recipe, Theirs
from rlhf.config.translation.verl import set_loggers

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
}
"""TRL's loss types that differ only in how they aggregate token losses -> our `actor.loss_agg_mode`."""
ENTRIES = ("dr_grpo", "cispo", "sapo")
"""TRL's loss types that are entries of our group `algorithm`, under the same names."""
REWARDS = {"accuracy_reward": "math_verify"}
"""Maps TRL's own reward functions to ours."""


def convert(theirs: Theirs, recipe: Recipe) -> None:
    """Move the settings that need a conversion from `theirs` to `recipe`."""
    recipe.groups |= {"model": "hf", "data": "files"}
    _loss(theirs, recipe)
    _kl(theirs, recipe)
    _batches(theirs, recipe)
    _rewards(theirs, recipe)
    _engine(theirs, recipe)
    _reference(theirs, recipe)
    _trainer(theirs, recipe)


def _loss(theirs: Theirs, recipe: Recipe) -> None:
    kind, level = theirs.text("loss_type"), theirs.text("importance_sampling_level")
    if level == "sequence":
        recipe.groups["algorithm"] = "gspo"
        if kind not in ("grpo", "dapo"):
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
    low, high = theirs.number("epsilon"), theirs.number("epsilon_high")
    if recipe.groups["algorithm"] != "gspo" or low != 0.2 or high is not None:
        recipe.set("actor.clip_ratio_low", low, "epsilon")
        recipe.set("actor.clip_ratio_high", low if high is None else high, "epsilon_high")
    scale = theirs.take("scale_rewards")
    if scale in (False, "none"):
        recipe.set("algorithm.norm_adv_by_std_in_grpo", False, "scale_rewards")
    elif scale not in (None, True, "group"):
        recipe.lose("scale_rewards", scale, "only the group's standard deviation scales rewards.")


def _kl(theirs: Theirs, recipe: Recipe) -> None:
    beta = theirs.number("beta")
    recipe.set("actor.use_kl_loss", bool(beta), "beta")
    if beta:
        recipe.set("actor.kl_loss_coef", beta, "beta")


def _batches(theirs: Theirs, recipe: Recipe) -> None:
    """Set the batch sizes. A step's samples are `generation_batch_size`, or else samples per device * devices *
    (`steps_per_generation`, or else the accumulation). A step's prompts are these samples / samples per prompt."""
    samples = theirs.number("per_device_train_batch_size", least=1)
    of_prompt = theirs.number("num_generations", least=1)
    accumulated = theirs.number("gradient_accumulation_steps", least=1)
    given = theirs.number("num_processes", least=1)
    devices = given or 1
    per_update = samples * accumulated * devices
    generated = theirs.number("generation_batch_size", least=1)
    steps = theirs.number("steps_per_generation", least=1)
    per_step = generated or samples * devices * (steps or accumulated)
    name = "per_device_train_batch_size"
    if per_step % of_prompt or per_update % of_prompt:
        wrong = per_step if per_step % of_prompt else per_update
        recipe.lose(name, samples, f"{wrong} samples are not whole groups of num_generations={of_prompt}.")
    recipe.set("rollout.n", of_prompt, "num_generations")
    recipe.set("data.train_batch_size", max(1, per_step // of_prompt), name)
    recipe.set("actor.ppo_mini_batch_size", max(1, min(per_step, per_update) // of_prompt), name)
    response, prompt = theirs.number("max_completion_length"), theirs.number("max_prompt_length")
    recipe.set("data.max_response_length", response, "max_completion_length")
    if prompt is not None:
        recipe.set("data.max_prompt_length", prompt, "max_prompt_length")
    recipe.set("actor.ppo_max_token_len_per_gpu", samples * (response + (prompt or 512)), name)
    if given is None:
        recipe.lose("num_processes", None, "the batch is that of one device; multiply it by your number of devices.")
    else:
        recipe.set("trainer.nproc", given, "num_processes")


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
    uses, mode = theirs.take("use_vllm"), theirs.text("vllm_mode")
    if not uses:
        recipe.groups["rollout"] = "embedded"
        theirs.take_section("vllm_")
        return
    recipe.groups["rollout"] = "vllm" if mode == "colocate" else "vllm_server"
    sleeps = theirs.take("vllm_enable_sleep_mode")
    if mode == "colocate":
        recipe.set("rollout.sleep_level", 2 if sleeps else 0, "vllm_enable_sleep_mode")
    url = theirs.take("vllm_server_base_url")
    host, port = theirs.take("vllm_server_host"), theirs.take("vllm_server_port")
    if url or host:
        recipe.set("rollout.servers.urls", [url or f"http://{host}:{port or 8000}"], "vllm_server_base_url")
    _correction(theirs, recipe)


def _correction(theirs: Theirs, recipe: Recipe) -> None:
    section = "algorithm.rollout_correction."
    corrects = theirs.take("vllm_importance_sampling_correction")
    mode = theirs.text("vllm_importance_sampling_mode") or "sequence_mask"
    cap = theirs.take("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    if corrects is False:
        return
    level, _, how = mode.partition("_")
    recipe.set(f"{section}rollout_is", level, "vllm_importance_sampling_mode")
    recipe.set(f"{section}rollout_is_threshold", cap or 3.0, "vllm_importance_sampling_cap")
    if how == "mask":
        why = (
            "here, weights above the threshold are truncated, not masked. With "
            f"{section}rollout_is_threshold_lower, weights outside of both thresholds become 0."
        )
        recipe.lose("vllm_importance_sampling_mode", mode, why)


def _reference(theirs: Theirs, recipe: Recipe) -> None:
    synced, alpha = theirs.take("sync_ref_model"), theirs.take("ref_model_mixup_alpha")
    steps = theirs.take("ref_model_sync_steps")
    if synced:
        recipe.set("ref.update_freq", steps or 512, "ref_model_sync_steps")
        recipe.set("ref.alpha", 0.6 if alpha is None else alpha, "ref_model_mixup_alpha")


def _trainer(theirs: Theirs, recipe: Recipe) -> None:
    set_loggers(theirs.texts("report_to"), "report_to", recipe)
    steps = theirs.number("max_steps")
    if steps is not None and steps > 0:
        recipe.set("trainer.total_training_steps", steps, "max_steps")
    if (strategy := theirs.text("eval_strategy")) in (None, "no"):
        theirs.take("eval_steps")
        recipe.set("trainer.test_freq", 0, "eval_strategy")
    elif strategy == "epoch":
        recipe.lose("eval_strategy", strategy, "trainer.test_freq counts steps.")
    saves = theirs.text("save_strategy")
    if saves == "no":
        theirs.take("save_steps")
        recipe.set("trainer.save_freq", 0, "save_strategy")
    elif saves == "epoch":
        theirs.take("save_steps")
        recipe.lose("save_strategy", saves, "trainer.save_freq counts steps.")
    _precision(theirs, recipe)
    _optimizer(theirs, recipe)
    if theirs.take("use_peft") is False:
        theirs.take_section("lora_")
    elif any(name.startswith("lora_") for name in theirs.left):
        recipe.set("model.lora.enabled", True, "use_peft")
    name, split = theirs.text("dataset_name"), theirs.text("dataset_train_split")
    subset = theirs.text("dataset_config")
    if name is not None:
        recipe.set("data.train_files", name + (f":{subset}" if subset else "") + f"@{split or 'train'}", "dataset_name")


def _precision(theirs: Theirs, recipe: Recipe) -> None:
    half = {name: theirs.take(name) for name in ("bf16", "fp16")}
    if half["fp16"]:
        recipe.lose("fp16", True, "backend.autocast is bfloat16 or none.")
    elif half["bf16"] is not None:
        recipe.set("backend.autocast", "bfloat16" if half["bf16"] else "none", "bf16")


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
