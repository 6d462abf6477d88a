"""Converts OpenRLHF's arguments whose values mean something else here (0.11.2, and flat names of earlier releases)."""

from rlhf.config.algorithm_table import ALGORITHMS, ESTIMATORS
from rlhf.config.translation.recipe import Recipe, Theirs

ALGORITHM = {
    "gae": "ppo",
    "group_norm": "grpo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "dr_grpo": "dr_grpo",
}


def convert(theirs: Theirs, recipe: Recipe) -> None:
    """Move the settings that need a conversion from `theirs` to `recipe`."""
    recipe.groups |= {"model": "hf", "data": "files"}
    _algorithm(theirs, recipe)
    _clip(theirs, recipe)
    _kl(theirs, recipe)
    _batches(theirs, recipe)
    _rewards(theirs, recipe)
    _engine(theirs, recipe)
    _machines(theirs, recipe)
    _trainer(theirs, recipe)


def _algorithm(theirs: Theirs, recipe: Recipe) -> None:
    name = theirs.text("advantage_estimator", "algo.advantage.estimator")
    if name not in ALGORITHM:
        recipe.lose("algo.advantage.estimator", name, f"choose an algorithm: {', '.join(ALGORITHMS)}.")
    entry = ALGORITHM.get(name, "grpo")
    loss = theirs.take("policy_loss_type", "actor.policy_loss_type")
    recipe.groups["algorithm"] = entry
    if loss == "gspo":
        recipe.set("actor.policy_loss.loss_mode", "gspo", "actor.policy_loss_type")
    if ESTIMATORS[ALGORITHMS[entry].adv_estimator].critic:
        rate = theirs.take("critic_learning_rate", "critic.learning_rate", "critic.adam.lr")
        recipe.set("critic.optim.lr", rate, "critic.learning_rate")
        recipe.set("critic.cliprange_value", theirs.take("value_clip", "critic.value_clip"), "critic.value_clip")
    else:
        theirs.take_section("critic.")
        theirs.take("critic_learning_rate", "critic_pretrain", "value_clip", "critic_num_gpus_per_node")
    if theirs.take("no_advantage_std_norm", "algo.advantage.no_std_norm"):
        recipe.set("algorithm.norm_adv_by_std_in_grpo", False, "algo.advantage.no_std_norm")
    if theirs.take("dynamic_filtering", "algo.dynamic_filtering_enable"):
        recipe.set("algorithm.filter_groups.enable", True, "algo.dynamic_filtering_enable")
        bounds = theirs.take("dynamic_filtering_reward_range", "algo.dynamic_filtering_range")
        why = "groups whose rewards are all equal are dropped, whatever their value."
        recipe.lose("algo.dynamic_filtering_range", bounds or [0, 1], why)


def _clip(theirs: Theirs, recipe: Recipe) -> None:
    pair = theirs.take("eps_clip_low_high", "actor.eps_clip_low_high")
    both = theirs.number("eps_clip", "actor.eps_clip")
    low, high = pair if isinstance(pair, list) and len(pair) == 2 else (both, both)
    recipe.set("actor.clip_ratio_low", low, "actor.eps_clip")
    recipe.set("actor.clip_ratio_high", high, "actor.eps_clip")


def _kl(theirs: Theirs, recipe: Recipe) -> None:
    weight = theirs.number("init_kl_coef", "algo.kl.init_coef")
    estimator = theirs.take("kl_estimator", "algo.kl.estimator")
    in_loss = bool(theirs.take("use_kl_loss", "algo.kl.use_loss"))
    recipe.set("actor.use_kl_loss", in_loss and weight > 0, "algo.kl.use_loss")
    recipe.set("algorithm.use_kl_in_reward", not in_loss and weight > 0, "algo.kl.use_loss")
    if weight <= 0:
        return
    coefficient, kind = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    if in_loss:
        coefficient, kind = ("actor.kl_loss_coef", "actor.kl_loss_type")
    recipe.set(coefficient, weight, "algo.kl.init_coef")
    recipe.set(kind, estimator, "algo.kl.estimator")
    target = theirs.number("kl_target", "algo.kl.target")
    if target is not None and not in_loss:
        recipe.set("algorithm.kl_ctrl.type", "adaptive", "algo.kl.target")
        recipe.set("algorithm.kl_ctrl.target_kl", target, "algo.kl.target")


def _batches(theirs: Theirs, recipe: Recipe) -> None:
    """Set prompts per update (samples / samples per prompt) and budgets of samples * (prompt + response) tokens."""
    n = int(theirs.number("n_samples_per_prompt", "rollout.n_samples_per_prompt", least=1))
    prompts = int(theirs.number("rollout_batch_size", "rollout.batch_size", least=1))
    samples = int(theirs.number("train_batch_size", "train.batch_size", least=1))
    response = int(theirs.number("generate_max_len", "rollout.max_new_tokens", least=1))
    prompt, total = theirs.number("prompt_max_len"), theirs.number("max_len", "data.max_len")
    prompt = prompt or (max(1, total - response) if total else 1024)
    recipe.set("rollout.n", n, "rollout.n_samples_per_prompt")
    recipe.set("data.train_batch_size", prompts, "rollout.batch_size")
    recipe.set("actor.ppo_mini_batch_size", max(1, min(samples // n, prompts)), "train.batch_size")
    recipe.set("data.max_response_length", response, "rollout.max_new_tokens")
    recipe.set("data.max_prompt_length", prompt, "prompt_max_len" if total is None else "data.max_len")
    micro = theirs.number("micro_train_batch_size", "train.micro_batch_size")
    budget = theirs.number("train_max_tokens_per_gpu", "train.max_tokens_per_gpu")
    dynamic = theirs.take("use_dynamic_batch", "train.dynamic_batch_enable")
    if dynamic or micro:
        tokens = budget or 16192 if dynamic else micro * (prompt + response)
        recipe.set("actor.ppo_max_token_len_per_gpu", max(tokens, prompt + response), "train.micro_batch_size")
    theirs.take("micro_rollout_batch_size", "rollout.micro_batch_size")
    limit = theirs.number("max_samples", "data.max_samples")
    if limit is not None and limit < 1e8:
        recipe.set("data.train_max_samples", int(limit), "data.max_samples")


def _rewards(theirs: Theirs, recipe: Recipe) -> None:
    url = theirs.take("remote_rm_url", "reward.remote_url")
    model = theirs.take("reward_pretrain", "reward.model_name_or_path")
    functions = []
    if url and str(url).endswith(".py"):
        functions.append(f"{url}:reward_func")
    elif url:
        recipe.lose("reward.remote_url", url, "write a function that asks this server, and set reward.network=true.")
    if model:
        functions.append("reward_model")
        recipe.set("reward_model.path", model, "reward.model_name_or_path")
    if functions:
        recipe.set("reward.functions", functions, "reward.remote_url")
    if theirs.take("normalize_reward", "reward.normalize_enable"):
        recipe.set("algorithm.normalize_reward", "running", "reward.normalize_enable")
    length = theirs.number("overlong_buffer_len", "reward.overlong_buffer_len")
    factor = theirs.take("overlong_penalty_factor", "reward.overlong_penalty_factor")
    if length:
        recipe.set("reward.overlong_buffer.enable", True, "reward.overlong_buffer_len")
        recipe.set("reward.overlong_buffer.len", int(length), "reward.overlong_buffer_len")
        recipe.set("reward.overlong_buffer.penalty_factor", factor or 1.0, "reward.overlong_penalty_factor")


def _engine(theirs: Theirs, recipe: Recipe) -> None:
    engines, shared = (
        theirs.take("vllm_num_engines", "vllm.num_engines"),
        theirs.take("colocate_all_models", "train.colocate_all"),
    )
    if not engines:
        recipe.groups["rollout"] = "embedded"
    elif shared:
        recipe.groups["rollout"] = "vllm"
    else:
        recipe.groups["rollout"] = "vllm_server"
        recipe.set("rollout.servers.count", engines, "vllm.num_engines")
    sleeps = theirs.take("vllm_enable_sleep", "vllm.enable_sleep")
    if shared and engines:
        recipe.set("rollout.sleep_level", 2 if sleeps else 0, "vllm.enable_sleep")
    if theirs.take("deepspeed_enable_sleep", "ds.enable_sleep"):
        recipe.set("actor.fsdp_config.optimizer_offload", True, "ds.enable_sleep")
    if theirs.take("async_train", "train.async_enable"):
        recipe.set("rollout.async_steps", theirs.take("train.async_queue_size") or 1, "train.async_enable")
    if theirs.take("vllm_enable_is_correction", "enable_vllm_is_correction"):
        recipe.set("algorithm.rollout_correction.rollout_is", "token", "vllm_enable_is_correction")


def _machines(theirs: Theirs, recipe: Recipe) -> None:
    theirs.take("actor_init_on_gpu")
    recipe.set("backend.name", "deepspeed", "ds.zero_stage")
    recipe.groups["backend"] = "deepspeed"
    del recipe.settings["backend.name"]
    for role in ("actor", "ref", "critic", "reward"):
        nodes = theirs.take(f"{role}_num_nodes", f"{role}.num_nodes")
        ranks = theirs.take(f"{role}_num_gpus_per_node", f"{role}.num_gpus_per_node")
        if role == "actor" and ranks is not None:
            recipe.set("trainer.nproc", ranks, "actor.num_gpus_per_node")
        if role == "actor" and nodes is not None and nodes > 1:
            recipe.set("trainer.nnodes", nodes, "actor.num_nodes")
    dtype = theirs.take("ds.param_dtype")
    if theirs.take("bf16") or dtype == "bf16":
        recipe.set("backend.autocast", "bfloat16", "bf16")


def _trainer(theirs: Theirs, recipe: Recipe) -> None:
    rate = theirs.take("actor_learning_rate", "actor.learning_rate", "actor.adam.lr")
    recipe.set("actor.optim.lr", rate, "actor.learning_rate")
    scheduler = theirs.take("lr_scheduler", "actor.lr_scheduler")
    if scheduler == "cosine_with_min_lr":
        recipe.set("actor.optim.lr_scheduler_type", "cosine", "lr_scheduler")
        recipe.set("actor.optim.min_lr_ratio", 0.1, "lr_scheduler")
    elif scheduler is not None:
        recipe.set("actor.optim.lr_scheduler_type", scheduler, "lr_scheduler")
    loggers = {
        "wandb": theirs.take("use_wandb", "logger.wandb.key"),
        "tensorboard": theirs.take("use_tensorboard", "logger.tensorboard_dir"),
    }
    if chosen := [name for name, value in loggers.items() if value]:
        recipe.set("trainer.logger", chosen, "logger")
    contents = ["model", "optimizer", "extra"]
    if theirs.take("save_hf_ckpt", "ckpt.save_hf"):
        recipe.set("checkpoint.contents", [*contents, "hf_model"], "ckpt.save_hf")
    for name in ("prompt_data", "data.prompt_dataset"):
        split = theirs.take("prompt_split", "data.prompt_split") if name in theirs.left else None
        if split and split != "train":
            recipe.set("data.train_files", f"{theirs.take(name)}@{split}", name)
