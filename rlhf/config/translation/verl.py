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
    if theirs.left.get("algorithm.filter_groups.enable") and metric is None:
        recipe.set("algorithm.filter_groups.metric", "seq_reward", "algorithm.filter_groups.metric")
    name = "algorithm.filter_groups.max_num_gen_batches"
    rounds = theirs.take(name)
    if rounds:
        recipe.set(name, rounds, name)
    elif rounds == 0 or theirs.left.get("algorithm.filter_groups.enable"):
        recipe.lose(name, 0, "verl generates without a limit; here, set the largest number of generations per step.")


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
    dynamic = {switch: theirs.left.get(switch) for _, switch in BUDGETS.values()}
    recipe.needless += theirs.drop(*dynamic)
    for name, (budget, switch) in BUDGETS.items():
        if dynamic[switch]:
            recipe.needless += theirs.drop(f"{name}_per_gpu", name)
            continue
        of_rank, of_all = theirs.number(f"{name}_per_gpu"), theirs.number(name)
        samples = of_rank or (max(1, of_all // ranks) if of_all else None)
        shown = f"{name}_per_gpu" if of_rank else name
        if samples is not None and not all(isinstance(length, int) for length in lengths):
            recipe.lose(shown, of_rank or of_all, f"set {budget} to the tokens that this many samples have.")
            continue
        recipe.needless += theirs.drop(budget)  # verl reads the budget only with the switch
        if samples is not None:
            recipe.set(budget, int(samples * sum(lengths)), shown)
        if of_rank and of_all:
            recipe.lose(name, of_all, f"{name}_per_gpu replaces it.")


def _prompts(theirs: Theirs, recipe: Recipe) -> None:
    drops, truncation = theirs.take("data.filter_overlong_prompts"), theirs.take("data.truncation")
    recipe.set("data.overlong_prompts", "filter" if drops else truncation, "data.truncation")


def _rewards(theirs: Theirs, recipe: Recipe) -> None:
    sections = ("custom_reward_function", "reward.custom_reward_function")
    path = theirs.take(*(f"{section}.path" for section in sections))
    names = [f"{section}.name" for section in sections]
    if not path:
        recipe.needless += theirs.drop(*names)
    name = theirs.take(*names) or "compute_score"
    judged = _reward_model(theirs, recipe, f"{path}:{name}" if path else None)
    if not path and not judged:
        recipe.lose(
            "custom_reward_function.path",
            None,
            "verl chooses its verifier by data_source; check that reward.functions=[math_verify] fits your data.",
        )
    functions = [f"{path}:{name}"] if path else ["reward_model"] if judged else ["math_verify"]
    recipe.set("reward.functions", functions, "custom_reward_function.path")
    if arguments := _reward_arguments(theirs, sections):
        recipe.set("reward.kwargs", arguments, "custom_reward_function.reward_kwargs")
    managers = [n for n in ("reward_model.reward_manager", "reward.reward_manager.name") if n in theirs.given]
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
        elif value is not None:
            recipe.lose(f"overlong_buffer.{leaf}", value, f"verl's reward manager {manager} does not read it.")
    if manager not in (None, "naive", "dapo"):
        recipe.lose("reward_manager", manager, "reward.functions does the work of verl's reward managers.")
    elif manager is not None:
        recipe.needless += managers


def _reward_model(theirs: Theirs, recipe: Recipe, function: str | None) -> bool:
    """Set the path of verl's reward model, and return whether the model scores.

    verl never adds scores: a reward model replaces the verifier, and a `function` of the user replaces both. (In older
    releases, without the reward loop, a reward model replaced the function, too.)
    """
    enabled = theirs.take("reward_model.enable", "reward.reward_model.enable")
    models = ("reward_model.model.path", "reward.reward_model.model_path")
    model = theirs.take(*models)
    if enabled and function is None:
        recipe.set("reward_model.path", model, models[0])
        return True
    for section in ("reward.reward_model.", "reward_model.model.", "reward_model.rollout."):
        recipe.needless += theirs.take_section(section)
    if enabled:
        why = (
            f"the recipe has reward.functions=[{function}] alone, which cannot call verl's reward model. For the "
            "model's score alone, set reward.functions=[reward_model] and reward_model.path."
        )
        recipe.lose(models[0], model, why)
    else:
        recipe.needless += [name for name in models if name in theirs.given and model is not None]
    return False


def _reward_arguments(theirs: Theirs, sections: Sequence[str]) -> dict[str, Any]:
    """Remove all settings `SECTION.reward_kwargs.NAME`, and return them as arguments of the reward function."""
    found: dict[str, Any] = {}
    for prefix in (f"{section}.reward_kwargs." for section in sections):
        for name in [each for each in theirs.left if each.startswith(prefix)]:
            *parents, leaf = name.removeprefix(prefix).split(".")
            at = found
            for parent in parents:
                at = at.setdefault(parent, {})
            at[leaf] = theirs.take(name)
    return found


def _engine(theirs: Theirs, recipe: Recipe) -> None:
    name = theirs.text("rollout.name")
    if name in ("vllm", None):
        recipe.groups["rollout"] = "vllm"
    elif name == "hf":
        recipe.groups["rollout"] = "embedded"
        recipe.needless += theirs.drop("rollout.tensor_model_parallel_size")
    else:
        recipe.groups["rollout"] = "vllm"
        recipe.lose("rollout.name", name, "the recipe has rollout=vllm, the engine that shares the trainer's devices.")
    set_sleep(theirs.take("rollout.free_cache_engine"), "rollout.free_cache_engine", recipe)
    recipe.needless += theirs.drop("rollout.prompt_length", "rollout.response_length")
    recipe.needless += theirs.drop("ref.strategy", "critic.strategy", "ref.fsdp_config.strategy")
    strategies = [name for name in ("actor.strategy", "actor.fsdp_config.strategy") if name in theirs.given]
    strategy = theirs.take("actor.strategy", "actor.fsdp_config.strategy")
    if strategy in ("fsdp", "fsdp2"):
        recipe.needless += strategies
    elif strategy is not None:
        recipe.lose("actor.strategy", strategy, "backend=fsdp2 and backend=deepspeed are the training engines.")


def _adapters(theirs: Theirs, recipe: Recipe) -> None:
    default = 32 if theirs.left.get("model.lora.rank") and not theirs.left.get("model.lora_rank") else 16
    rank = theirs.take("model.lora_rank", "model.lora.rank")
    if not rank:
        names = ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
        recipe.needless += theirs.drop(*(f"model.{name}" for name in names)) + theirs.take_section("model.lora.")
        return
    alpha = theirs.take("model.lora_alpha", "model.lora.alpha")
    recipe.set("model.lora.alpha", default if alpha is None else alpha, "model.lora_alpha")
    recipe.set("model.lora.enabled", True, "model.lora_rank")
    recipe.set("model.lora.rank", rank, "model.lora_rank")


def _schedule(theirs: Theirs, recipe: Recipe) -> None:
    for role in ("actor", "critic"):
        of_optim = f"{role}.optim."
        if theirs.left.get(f"{of_optim}weight_decay") == 0:
            recipe.needless += theirs.drop(f"{of_optim}decay_norm_and_bias")  # an error here without a decay
        steps, share = theirs.number(f"{of_optim}lr_warmup_steps"), theirs.number(f"{of_optim}lr_warmup_steps_ratio")
        recipe.needless += theirs.drop(f"{of_optim}total_training_steps")
        if steps is not None and steps >= 0:
            if share:
                recipe.lose(f"{of_optim}lr_warmup_steps_ratio", share, f"{of_optim}lr_warmup_steps replaces it.")
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
    """Set `trainer.logger` to the trackers in `wanted` that exist here. Leave out `console`, which needs no tracker."""
    known = [logger for logger in wanted if logger in LOGGERS and logger != "console"]
    if wanted:
        recipe.set("trainer.logger", known, name)
    for logger in wanted:
        if logger not in (*LOGGERS, "none", "all"):
            recipe.lose(name, logger, f"the trackers here are {', '.join(LOGGERS)}.")


def set_sleep(sleeps: bool | None, name: str, recipe: Recipe) -> None:
    """Set `rollout.sleep_level` for the other trainer's `name`. None (not in the file) sets nothing: sleep changes no
    result, and with `sleep_level=0` the recipe could not be tried on a CPU with rollout=embedded."""
    if sleeps is not None:
        recipe.set("rollout.sleep_level", 2 if sleeps else 0, name)
