"""Converts verl's settings whose values mean something else here (verl 0.9.1)."""

from collections.abc import Sequence
from typing import Any

from rlhf.config.algorithm_table import ALGORITHMS, ESTIMATORS
from rlhf.config.names.other_trainers import other_trainers
from rlhf.config.rules.validate import LOGGERS
from rlhf.config.translation.recipe import Recipe, Theirs

BUDGETS = {
    "actor.ppo_micro_batch_size": ("actor.ppo_max_token_len_per_gpu", "actor.use_dynamic_bsz"),
    "critic.ppo_micro_batch_size": ("critic.ppo_max_token_len_per_gpu", "critic.use_dynamic_bsz"),
    "critic.forward_micro_batch_size": ("critic.forward_max_token_len_per_gpu", "critic.use_dynamic_bsz"),
    "rollout.log_prob_micro_batch_size": ("rollout.log_prob_max_token_len_per_gpu", "rollout.log_prob_use_dynamic_bsz"),
    "ref.log_prob_micro_batch_size": ("ref.log_prob_max_token_len_per_gpu", "ref.log_prob_use_dynamic_bsz"),
}
"""verl's micro-batch sizes in samples, each with our token budget and with verl's switch to token budgets."""


def convert(theirs: Theirs, recipe: Recipe) -> None:
    """Move the settings that need a conversion from `theirs` to `recipe`."""
    recipe.groups |= {"model": "hf", "data": "files"}
    _algorithm(theirs, recipe)
    _clip(theirs, recipe)
    _micro_batches(theirs, recipe)
    _prompts(theirs, recipe)
    _rewards(theirs, recipe)
    _engine(theirs, recipe)
    _adapters(theirs, recipe)
    _schedule(theirs, recipe)
    _machines(theirs, recipe)


def _algorithm(theirs: Theirs, recipe: Recipe) -> None:
    name = theirs.text("algorithm.adv_estimator")
    entry = other_trainers().values.get(name, name)
    if entry not in ALGORITHMS:
        recipe.lose("algorithm.adv_estimator", name, f"choose an algorithm: {', '.join(ALGORITHMS)}.")
        entry = "grpo"
    recipe.groups["algorithm"] = entry
    if not ESTIMATORS[ALGORITHMS[entry].adv_estimator].critic:
        recipe.needless += theirs.take_section("critic.")
    metric = theirs.text("algorithm.filter_groups.metric")
    if metric is not None:
        ours = {"seq_final_reward": "seq_reward", "reward": "seq_reward", "score": "seq_reward"}
        recipe.set("algorithm.filter_groups.metric", ours.get(metric, metric), "algorithm.filter_groups.metric")
    rounds = theirs.take("algorithm.filter_groups.max_num_gen_batches")
    if rounds:  # 0 means no limit
        name = "algorithm.filter_groups.max_num_gen_batches"
        recipe.set(name, rounds, name)


def _clip(theirs: Theirs, recipe: Recipe) -> None:
    both = theirs.take("actor.clip_ratio")
    for side in ("actor.clip_ratio_low", "actor.clip_ratio_high"):
        own = theirs.take(side)
        if own is not None or both is not None:
            recipe.set(side, both if own is None else own, side if own is not None else "actor.clip_ratio")
    if theirs.take("actor.use_token_level_loss"):
        recipe.set("actor.loss_agg_mode", "token-mean", "actor.use_token_level_loss")


def _micro_batches(theirs: Theirs, recipe: Recipe) -> None:
    """Replace micro-batches of N samples by budgets of N * (prompt + response) tokens."""
    lengths: list[Any] = [theirs.left.get(f"data.max_{part}_length") for part in ("prompt", "response")]
    ranks = theirs.left.get("trainer.n_gpus_per_node")
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else 8
    for name, (budget, switch) in BUDGETS.items():
        of_rank, of_all = theirs.number(f"{name}_per_gpu"), theirs.number(name)
        dynamic = theirs.take(switch)
        if dynamic or not all(isinstance(length, int) for length in lengths):
            continue
        theirs.take(budget)  # verl reads the budget only with the switch
        samples = of_rank or (max(1, of_all // ranks) if of_all else None)
        if isinstance(samples, int):
            recipe.set(budget, samples * sum(lengths), f"{name}_per_gpu" if of_rank else name)


def _prompts(theirs: Theirs, recipe: Recipe) -> None:
    drops, truncation = theirs.take("data.filter_overlong_prompts"), theirs.take("data.truncation")
    recipe.set("data.overlong_prompts", "filter" if drops else truncation, "data.truncation")


def _rewards(theirs: Theirs, recipe: Recipe) -> None:
    sections = ("custom_reward_function", "reward.custom_reward_function")
    path = theirs.take(*(f"{section}.path" for section in sections))
    name = theirs.take(*(f"{section}.name" for section in sections)) or "compute_score"
    functions = [f"{path}:{name}"] if path else ["math_verify"]
    if not path:
        recipe.lose(
            "custom_reward_function.path",
            None,
            "verl chooses its verifier by data_source; check that reward.functions=[math_verify] fits your data.",
        )
    enabled = theirs.take("reward_model.enable", "reward.reward_model.enable")
    model = theirs.take("reward_model.model.path", "reward.reward_model.model_path")
    if enabled:
        functions.append("reward_model")
        recipe.set("reward_model.path", model, "reward_model.model.path")
    else:
        theirs.take_section("reward.reward_model.")
        theirs.take_section("reward_model.model.")
        theirs.take_section("reward_model.rollout.")
    recipe.set("reward.functions", functions, "custom_reward_function.path")
    manager = theirs.take("reward_model.reward_manager", "reward.reward_manager.name")
    for leaf in ("enable", "len", "penalty_factor"):
        places = (
            "reward_model.overlong_buffer",
            "custom_reward_function.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg",
        )
        value = theirs.take(*(f"{place}.{leaf}" for place in places))
        if value is not None and manager in ("dapo", None):
            recipe.set(f"reward.overlong_buffer.{leaf}", value, f"overlong_buffer.{leaf}")


def _engine(theirs: Theirs, recipe: Recipe) -> None:
    name = theirs.text("rollout.name")
    if name in ("vllm", None):
        recipe.groups["rollout"] = "vllm"
    elif name == "hf":
        recipe.groups["rollout"] = "embedded"
        theirs.take("rollout.tensor_model_parallel_size")
    else:
        recipe.groups["rollout"] = "vllm"
        recipe.lose("rollout.name", name, "rollout=vllm is the engine on the trainer's devices.")
    sleeps = theirs.take("rollout.free_cache_engine")
    if sleeps is not None:
        recipe.set("rollout.sleep_level", 2 if sleeps else 0, "rollout.free_cache_engine")
    theirs.take("rollout.prompt_length", "rollout.response_length")
    strategy = theirs.take("actor.strategy", "actor.fsdp_config.strategy")
    theirs.take("ref.strategy", "critic.strategy", "ref.fsdp_config.strategy")
    if strategy not in (None, "fsdp", "fsdp2"):
        recipe.lose("actor.strategy", strategy, "backend=fsdp2 and backend=deepspeed are the training engines.")


def _adapters(theirs: Theirs, recipe: Recipe) -> None:
    rank = theirs.take("model.lora_rank", "model.lora.rank")
    if not rank:
        for name in ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path"):
            theirs.take(f"model.{name}")
        theirs.take_section("model.lora.")
        return
    recipe.set("model.lora.enabled", True, "model.lora_rank")
    recipe.set("model.lora.rank", rank, "model.lora_rank")


def _schedule(theirs: Theirs, recipe: Recipe) -> None:
    for role in ("actor", "critic"):
        of_optim = f"{role}.optim."
        steps, share = theirs.take(f"{of_optim}lr_warmup_steps"), theirs.take(f"{of_optim}lr_warmup_steps_ratio")
        theirs.take(f"{of_optim}total_training_steps")
        if steps is not None and steps >= 0:
            recipe.set(f"{of_optim}lr_warmup_steps", steps, f"{of_optim}lr_warmup_steps")
        elif share:
            why = f"set {of_optim}lr_warmup_steps to this share of the run's training steps."
            recipe.lose(f"{of_optim}lr_warmup_steps_ratio", share, why)


def _machines(theirs: Theirs, recipe: Recipe) -> None:
    if theirs.left.get("trainer.nnodes") == 1:
        theirs.take("trainer.nnodes")
    for role in ("actor", "critic", "ref"):
        for name in (f"{role}.fsdp_config.fsdp_size", f"{role}.model.fsdp_config.fsdp_size"):
            if theirs.left.get(name) == -1:
                theirs.take(name)
        if theirs.left.get(f"{role}.ulysses_sequence_parallel_size") == 1:
            theirs.take(f"{role}.ulysses_sequence_parallel_size")
    set_loggers(theirs.texts("trainer.logger"), "trainer.logger", recipe)


def set_loggers(wanted: Sequence[str], name: str, recipe: Recipe) -> None:
    """Set `trainer.logger` to the trackers in `wanted` that exist here. `console` is left out: it needs no tracker."""
    known = [logger for logger in wanted if logger in LOGGERS and logger != "console"]
    if known:
        recipe.set("trainer.logger", known, name)
    for logger in wanted:
        if logger not in (*LOGGERS, "none", "all"):
            recipe.lose(name, logger, f"the trackers here are {', '.join(LOGGERS)}.")
