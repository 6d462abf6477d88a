"""Converts arguments of OpenRLHF 0.11.2, and flat names of earlier releases, whose values mean something else here."""

from rlhf.config.algorithm_table import ALGORITHMS, ESTIMATORS
from rlhf.config.translation.openrlhf_training import adapters, correction, optimizer, share_between_optimizers
from rlhf.config.translation.recipe import NO_DUAL_CLIP, Recipe, Theirs
from rlhf.config.translation.verl import set_sleep

ALGORITHM = {
    "gae": "ppo",
    "group_norm": "grpo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "dr_grpo": "dr_grpo",
}
COLOCATED = ("colocate_all_models", "train.colocate_all")


def convert(theirs: Theirs, recipe: Recipe) -> None:
    """Move the settings that need a conversion from `theirs` to `recipe`."""
    recipe.groups |= {"model": "hf", "data": "files"}
    share_between_optimizers(theirs)
    _algorithm(theirs, recipe)
    _clip(theirs, recipe)
    _kl(theirs, recipe)
    _batches(theirs, recipe)
    _rewards(theirs, recipe)
    _engine(theirs, recipe)
    correction(theirs, recipe)
    adapters(theirs, recipe)
    _machines(theirs, recipe)
    optimizer("actor", theirs, recipe)
    _trainer(theirs, recipe)


def _algorithm(theirs: Theirs, recipe: Recipe) -> None:
    name = theirs.text("advantage_estimator", "algo.advantage.estimator")
    if name not in ALGORITHM:
        recipe.lose("algo.advantage.estimator", name, f"choose an algorithm: {', '.join(ALGORITHMS)}.")
    entry = ALGORITHM.get(name, "grpo")
    loss = theirs.take("policy_loss_type", "actor.policy_loss_type")
    recipe.groups["algorithm"] = entry
    if loss != "ppo":
        recipe.set("actor.policy_loss.loss_mode", loss, "actor.policy_loss_type")
    if loss == "gspo":
        recipe.set("actor.loss_agg_mode", "seq-mean-token-mean", "actor.policy_loss_type")
    elif entry == "dr_grpo":  # OpenRLHF's changes the advantage alone
        recipe.set("actor.loss_agg_mode", "token-mean", "algo.advantage.estimator")
    if ESTIMATORS[ALGORITHMS[entry].adv_estimator].critic:
        optimizer("critic", theirs, recipe)
        recipe.set("critic.cliprange_value", theirs.take("value_clip", "critic.value_clip"), "critic.value_clip")
    else:
        recipe.needless += theirs.take_section("critic.") + theirs.take_section("critic_")
        recipe.needless += theirs.drop("value_clip", "freezing_actor_steps")
    if theirs.take("no_advantage_std_norm", "algo.advantage.no_std_norm"):
        recipe.set("algorithm.norm_adv_by_std_in_grpo", False, "algo.advantage.no_std_norm")
    if theirs.take("dynamic_filtering", "algo.dynamic_filtering_enable"):
        recipe.set("algorithm.filter_groups.enable", True, "algo.dynamic_filtering_enable")
        bounds = theirs.take("dynamic_filtering_reward_range", "algo.dynamic_filtering_range")
        why = "here, groups whose rewards are all equal are dropped, whatever the rewards are."
        recipe.lose("algo.dynamic_filtering_range", bounds or [0, 1], why)


def _clip(theirs: Theirs, recipe: Recipe) -> None:
    pair = theirs.take("eps_clip_low_high", "actor.eps_clip_low_high")
    if isinstance(pair, list) and len(pair) == 2:
        low, high = pair
        recipe.needless += theirs.drop("eps_clip", "actor.eps_clip")
    else:
        low = high = theirs.number("eps_clip", "actor.eps_clip")
        if pair is not None:
            recipe.lose("actor.eps_clip_low_high", pair, "must be two numbers.")
    recipe.set("actor.clip_ratio_low", low, "actor.eps_clip")
    recipe.set("actor.clip_ratio_high", high, "actor.eps_clip")
    dual = theirs.take("dual_clip", "actor.dual_clip")
    if recipe.settings.get("actor.policy_loss.loss_mode") is None:
        recipe.set("actor.clip_ratio_c", NO_DUAL_CLIP if dual is None else dual, "actor.dual_clip")
    elif dual is not None:
        recipe.lose("actor.dual_clip", dual, "only actor.policy_loss.loss_mode=vanilla has a dual clip.")


def _kl(theirs: Theirs, recipe: Recipe) -> None:
    weight = theirs.number("init_kl_coef", "algo.kl.init_coef")
    in_loss = bool(theirs.take("use_kl_loss", "algo.kl.use_loss"))
    recipe.set("actor.use_kl_loss", in_loss and weight > 0, "algo.kl.use_loss")
    recipe.set("algorithm.use_kl_in_reward", not in_loss and weight > 0, "algo.kl.use_loss")
    if weight <= 0:
        recipe.needless += theirs.drop("kl_estimator", "algo.kl.estimator", "kl_target", "algo.kl.target")
        recipe.needless += theirs.drop("kl_horizon", "algo.kl.horizon")
        return
    estimator = theirs.take("kl_estimator", "algo.kl.estimator")
    coefficient, kind = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    if in_loss:
        coefficient, kind = ("actor.kl_loss_coef", "actor.kl_loss_type")
    recipe.set(coefficient, weight, "algo.kl.init_coef")
    recipe.set(kind, estimator, "algo.kl.estimator")
    target = theirs.number("kl_target", "algo.kl.target")
    if target is not None and not in_loss:
        recipe.set("algorithm.kl_ctrl.type", "adaptive", "algo.kl.target")
        recipe.set("algorithm.kl_ctrl.target_kl", target, "algo.kl.target")
    elif target is not None:
        recipe.lose("algo.kl.target", target, "the weight of a KL in the loss is constant.")
    if recipe.settings.get("algorithm.kl_ctrl.type") != "adaptive":
        recipe.needless += theirs.drop("kl_horizon", "algo.kl.horizon")


def _batches(theirs: Theirs, recipe: Recipe) -> None:
    """Set batch sizes in prompts, length limits, and the token budget of a micro-batch.

    OpenRLHF counts the batch of an update in samples, and a micro-batch, too, unless its batches are dynamic.
    """
    n = int(theirs.number("n_samples_per_prompt", "rollout.n_samples_per_prompt", least=1))
    prompts = int(theirs.number("rollout_batch_size", "rollout.batch_size", least=1))
    samples = int(theirs.number("train_batch_size", "train.batch_size", least=1))
    prompt, response = _lengths(theirs, recipe)
    recipe.set("rollout.n", n, "rollout.n_samples_per_prompt")
    recipe.set("data.train_batch_size", prompts, "rollout.batch_size")
    recipe.set("actor.ppo_mini_batch_size", max(1, min(samples // n, prompts)), "train.batch_size")
    recipe.set("data.max_response_length", response, "rollout.max_new_tokens")
    recipe.set("data.max_prompt_length", prompt, "data.max_len")
    micro_given = [name for name in ("micro_train_batch_size", "train.micro_batch_size") if name in theirs.given]
    micro = theirs.number("micro_train_batch_size", "train.micro_batch_size")
    budget = theirs.number("train_max_tokens_per_gpu", "train.max_tokens_per_gpu")
    dynamic = theirs.take("use_dynamic_batch", "train.dynamic_batch_enable")
    if dynamic or micro:
        tokens = budget or 16192 if dynamic else micro * (prompt + response)
        recipe.set("actor.ppo_max_token_len_per_gpu", max(tokens, prompt + response), "train.micro_batch_size")
        if dynamic:
            recipe.needless += micro_given
    if not dynamic and budget:
        recipe.lose("train.max_tokens_per_gpu", budget, "OpenRLHF reads it only with train.dynamic_batch_enable.")
    recipe.needless += theirs.drop("micro_rollout_batch_size", "rollout.micro_batch_size")
    limit = theirs.number("max_samples", "data.max_samples")
    if limit is not None and limit < 1e8:
        recipe.set("data.train_max_samples", int(limit), "data.max_samples")


def _lengths(theirs: Theirs, recipe: Recipe) -> tuple[int, int]:
    """Return the largest numbers of tokens of a prompt and a response."""
    response = theirs.number("generate_max_len", "max_new_tokens", "rollout.max_new_tokens", least=1)
    prompt = theirs.number("prompt_max_len", least=1)
    total = theirs.number("max_len", "data.max_len", least=2)
    if response is None:
        room = total or 2048
        response = max(1, room - prompt) if prompt else room // 2
        why = (
            "OpenRLHF gives a response the tokens that its prompt leaves of data.max_len; the recipe has fixed limits, "
            "data.max_prompt_length and data.max_response_length."
        )
        recipe.lose("rollout.max_new_tokens", None, why)
    elif prompt and total and prompt + response > total:
        recipe.lose("data.max_len", total, "the limits of prompts and responses are separate, and their sum is larger.")
    return int(prompt or (max(1, total - response) if total else 1024)), int(response)


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
    clips = theirs.take("reward_clip_range", "reward.clip_range")
    recipe.set("algorithm.reward_clip_range", clips, "reward.clip_range")
    if not length:
        recipe.needless += theirs.drop("overlong_penalty_factor", "reward.overlong_penalty_factor")
    else:
        factor = theirs.take("overlong_penalty_factor", "reward.overlong_penalty_factor")
        recipe.set("reward.overlong_buffer.enable", True, "reward.overlong_buffer_len")
        recipe.set("reward.overlong_buffer.len", int(length), "reward.overlong_buffer_len")
        recipe.set("reward.overlong_buffer.penalty_factor", factor or 1.0, "reward.overlong_penalty_factor")


def _engine(theirs: Theirs, recipe: Recipe) -> None:
    shares = [name for name in COLOCATED if name in theirs.given]
    engines, shared = theirs.take("vllm_num_engines", "vllm.num_engines"), theirs.take(*COLOCATED)
    if not engines:
        recipe.needless += shares
        recipe.groups["rollout"] = "embedded"
    elif shared:
        recipe.groups["rollout"] = "vllm"
    else:
        recipe.groups["rollout"] = "vllm_server"
        recipe.set("rollout.servers.count", engines, "vllm.num_engines")
    if not (shared and engines):
        recipe.needless += theirs.drop("vllm_enable_sleep", "vllm.enable_sleep")
    else:
        set_sleep(theirs.take("vllm_enable_sleep", "vllm.enable_sleep"), "vllm.enable_sleep", recipe)
    if theirs.take("deepspeed_enable_sleep", "ds.enable_sleep"):
        recipe.set("actor.fsdp_config.optimizer_offload", True, "ds.enable_sleep")
    if theirs.take("async_train", "train.async_enable"):
        queue = theirs.take("async_queue_size", "train.async_queue_size")
        recipe.set("rollout.async_steps", queue or 1, "train.async_enable")
    else:
        recipe.needless += theirs.drop("async_queue_size", "train.async_queue_size")


def _machines(theirs: Theirs, recipe: Recipe) -> None:
    recipe.needless += theirs.drop("actor_init_on_gpu")
    recipe.set("backend.name", "deepspeed", "ds.zero_stage")
    recipe.groups["backend"] = "deepspeed"
    del recipe.settings["backend.name"]
    for role in ("actor", "ref", "critic", "reward"):
        nodes = (f"{role}_num_nodes", f"{role}.num_nodes")
        ranks = (f"{role}_num_gpus_per_node", f"{role}.num_gpus_per_node")
        if role == "actor":
            recipe.set("trainer.nproc", theirs.take(*ranks), "actor.num_gpus_per_node")
            recipe.set("trainer.nnodes", theirs.take(*nodes), "actor.num_nodes")
        else:
            recipe.needless += theirs.drop(*nodes, *ranks)
    dtype = theirs.take("param_dtype", "ds.param_dtype")
    half = theirs.take("bf16")
    if half in (None, True) and dtype == "bf16":
        recipe.set("backend.autocast", "bfloat16", "ds.param_dtype")
    else:
        name, value = ("ds.param_dtype", dtype) if half is None else ("bf16", half)
        recipe.lose(name, value, "backend.autocast is bfloat16 or none.")


def _trainer(theirs: Theirs, recipe: Recipe) -> None:
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
