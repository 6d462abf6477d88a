"""Sentences about names and values of verl, TRL, OpenRLHF and Hydra that no one setting of ours stands for."""

BOTH_CLIPS = "It clips on both sides; set actor.clip_ratio_low and actor.clip_ratio_high."
NOT_QUANTISED = "Adapters are trained beside weights in float32 or bfloat16: set model.lora.base_dtype."
WHOLE_CRITIC = "The critic is trained whole; adapters are the policy's (model.lora.enabled)."
OWN_FUNCTION = "Write 'reward.functions=[FILE.py:NAME]'."
OWN_RECIPE = "A recipe of your own is DIR/recipes/NAME.yaml, chosen with --config-dir DIR recipes=NAME."
NOT_NEEDED = "Leave it out: there is no such choice here."
REPLICAS = "Set backend.dp_replicate, the number of replicas: the ranks divided by verl's fsdp_size."
BY_TOKENS = "Leave it out: micro-batches are always filled up to actor.ppo_max_token_len_per_gpu tokens."
WARMUP = "Set actor.optim.lr_warmup_steps, a number of optimizer steps."
DTYPES = "Trained weights are float32; backend.autocast=bfloat16 computes in bfloat16, rollout.dtype is the engine's."
ONE_OPTIMIZER = "It is AdamW: actor.optim.betas, actor.optim.eps and actor.optim.weight_decay; the critic's likewise."
WHOLE_SAMPLES = "Leave it out: no sample is split over ranks; actor.ppo_max_token_len_per_gpu bounds what a pass holds."
IN_CHUNKS = "Leave it out: log-probs and entropy are always taken in chunks of tokens, never from all logits at once."
WITH_WHAT = "The engine is chosen with rollout=embedded, rollout=vllm (on the ranks' devices) or rollout=vllm_server."
SPLIT = "The split stands behind a Hub name: data.train_files=NAME@train, data.val_files=NAME@test."
NO_TURNS = "Leave it out: a sample is one response; there are no tools and no turns."
A_REWARD_MODEL = "Name reward_model among reward.functions, and set reward_model.path."
NODES = "Ranks on several machines are started with torchrun (docs/fault-tolerance.md); trainer.nproc is of one."

HYDRA_FOLDERS = (
    "The working directory never changes; the run's is DIR/PROJECT/EXPERIMENT, by trainer.default_local_dir, "
    "trainer.project_name and trainer.experiment_name."
)
VALIDATED = (
    "No run is without a step. The starting policy is evaluated before the first one, as step 0: set "
    "trainer.total_training_steps=1 for the shortest run."
)
SAME_COMMAND = "The same command again resumes the run; trainer.resume_from_path starts from another's checkpoint."

COUNTED_IN_SAMPLES = {
    "actor.ppo_micro_batch_size": "actor.ppo_max_token_len_per_gpu",
    "actor.ppo_micro_batch_size_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_max_token_len_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": "critic.forward_max_token_len_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_max_token_len_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu": "critic.ppo_max_token_len_per_gpu",
    "micro_train_batch_size": "actor.ppo_max_token_len_per_gpu",
    "per_device_train_batch_size": "actor.ppo_max_token_len_per_gpu",
    "ref.log_prob_micro_batch_size": "ref.log_prob_max_token_len_per_gpu",
    "ref.log_prob_micro_batch_size_per_gpu": "ref.log_prob_max_token_len_per_gpu",
    "reward_model.micro_batch_size": "reward_model.forward_max_token_len_per_gpu",
    "reward_model.micro_batch_size_per_gpu": "reward_model.forward_max_token_len_per_gpu",
    "rollout.log_prob_micro_batch_size": "rollout.log_prob_max_token_len_per_gpu",
    "rollout.log_prob_micro_batch_size_per_gpu": "rollout.log_prob_max_token_len_per_gpu",
    "train.micro_batch_size": "actor.ppo_max_token_len_per_gpu",
}
"""Their sizes of a micro-batch, and the budget of tokens that does here what they do there."""

REMARKS = {
    "actor.clip_ratio": BOTH_CLIPS,
    "actor.eps_clip": BOTH_CLIPS,
    "actor.eps_clip_low_high": BOTH_CLIPS,
    "clip_range": BOTH_CLIPS,
    "clip_ratio": BOTH_CLIPS,
    "cliprange": BOTH_CLIPS,
    "epsilon": BOTH_CLIPS,
    "eps_clip": BOTH_CLIPS,
    "eps_clip_low_high": BOTH_CLIPS,
    "actor_num_nodes": NODES,
    "actor.num_nodes": NODES,
    "nnodes": NODES,
    "num_nodes": NODES,
    "trainer.nnodes": NODES,
    "beta": "The KL in the loss has actor.use_kl_loss=true and its weight actor.kl_loss_coef, the one in the reward "
    "algorithm.use_kl_in_reward=true and algorithm.kl_ctrl.kl_coef.",
    "config_name": "A named experiment is chosen with recipes=NAME; --help lists them.",
    "config_path": "Recipes of your own lie in DIR/recipes, with --config-dir DIR.",
    "config": OWN_RECIPE,
    "config_file": OWN_RECIPE,
    "custom_reward_function.name": OWN_FUNCTION,
    "custom_reward_function.path": OWN_FUNCTION,
    "reward.custom_reward_function.name": OWN_FUNCTION,
    "reward.custom_reward_function.path": OWN_FUNCTION,
    "reward.reward_manager.name": OWN_FUNCTION,
    "reward.remote_url": OWN_FUNCTION,
    "remote_rm_url": OWN_FUNCTION,
    "reward_model.reward_manager": OWN_FUNCTION,
    "data.reward_fn_key": "The column is called data_source.",
    "data.val_batch_size": "Held-out prompts are generated together, rollout.max_num_seqs samples of a rank at a time.",
    "gradient_accumulation_steps": "It follows from actor.ppo_mini_batch_size, rollout.n, the ranks, the "
    "samples' lengths and actor.ppo_max_token_len_per_gpu.",
    "critic.model.lora_alpha": WHOLE_CRITIC,
    "critic.model.lora_rank": WHOLE_CRITIC,
    "critic.model.target_modules": WHOLE_CRITIC,
    "bnb_4bit_quant_type": NOT_QUANTISED,
    "use_bnb_nested_quant": NOT_QUANTISED,
    "load_in_4bit": NOT_QUANTISED,
    "load_in_8bit": NOT_QUANTISED,
    "model.load_in_4bit": NOT_QUANTISED,
    "model.load_in_8bit": NOT_QUANTISED,
    "model.quantization": NOT_QUANTISED,
    "algorithm.rollout_correction.bypass_mode": "Leave it out: old log-probs are always the training engine's; "
    "algorithm.rollout_correction.rollout_is=token weighs how far the rollout engine's are from them.",
    "rollout.layered_summon": "Leave it out: weights are always sent to the engine one after the other.",
    "rollout.load_format": "Leave it out: the ranks always send the engine its weights.",
    "use_adaptive_entropy": "Set actor.entropy_ctrl.type=adaptive.",
    "actor.use_dynamic_bsz": BY_TOKENS,
    "critic.use_dynamic_bsz": BY_TOKENS,
    "ref.log_prob_use_dynamic_bsz": BY_TOKENS,
    "reward_model.use_dynamic_bsz": BY_TOKENS,
    "rollout.log_prob_use_dynamic_bsz": BY_TOKENS,
    "use_dynamic_batch": BY_TOKENS,
    "actor.fsdp_config.fsdp_size": REPLICAS,
    "critic.fsdp.fsdp_size": REPLICAS,
    "critic.model.fsdp_config.fsdp_size": REPLICAS,
    "ref.fsdp_config.fsdp_size": REPLICAS,
    "actor.fsdp_config.forward_prefetch": NOT_NEEDED,
    "actor.checkpoint.strict": NOT_NEEDED,
    "actor.use_torch_compile": NOT_NEEDED,
    "cache_implementation": NOT_NEEDED,
    "data.dataloader_num_workers": NOT_NEEDED,
    "data.filter_overlong_prompts_workers": NOT_NEEDED,
    "data.return_raw_chat": NOT_NEEDED,
    "ds3_gather_for_generation": NOT_NEEDED,
    "remove_unused_columns": NOT_NEEDED,
    "rollout.calculate_log_probs": "Leave it out: the engine's log-probs are always kept.",
    "use_transformers_paged": NOT_NEEDED,
    "vllm_sync_backend": NOT_NEEDED,
    "vllm_sync_with_ray": NOT_NEEDED,
    "eval_split": SPLIT,
    "prompt_split": SPLIT,
    "ds_tensor_parallel_size": "Training has none: backend=fsdp2 and backend.zero_stage=3 spread the weights.",
    "logging_steps": "Leave it out: every step is logged.",
    "actor.optim.optimizer": ONE_OPTIMIZER,
    "critic.optim.optimizer": ONE_OPTIMIZER,
    "actor.optim.override_optimizer_config": ONE_OPTIMIZER,
    "critic.optim.override_optimizer_config": ONE_OPTIMIZER,
    "optim": ONE_OPTIMIZER,
    "actor.fsdp_config.ulysses_sequence_parallel_size": WHOLE_SAMPLES,
    "actor.ulysses_sequence_parallel_size": WHOLE_SAMPLES,
    "critic.ulysses_sequence_parallel_size": WHOLE_SAMPLES,
    "ref.ulysses_sequence_parallel_size": WHOLE_SAMPLES,
    "ring_attn_size": WHOLE_SAMPLES,
    "actor.entropy_checkpointing": IN_CHUNKS,
    "actor.entropy_from_logits_with_chunking": IN_CHUNKS,
    "actor.use_fused_kernels": IN_CHUNKS,
    "model.use_fused_kernels": IN_CHUNKS,
    "rollout.mode": WITH_WHAT,
    "vllm_mode": WITH_WHAT,
    "max_tool_calling_iterations": NO_TURNS,
    "rollout.multi_turn.enable": NO_TURNS,
    "steps_per_generation": "A step makes data.train_batch_size / actor.ppo_mini_batch_size updates in each of its "
    "actor.ppo_epochs.",
    "hydra.job.chdir": HYDRA_FOLDERS,
    "hydra.run.dir": HYDRA_FOLDERS,
    "hydra.sweep.dir": HYDRA_FOLDERS,
    "trainer.balance_batch": "Leave it out: work is always balanced over the ranks.",
    "colocate_all_models": NOT_NEEDED,
    "actor_rollout_ref": "Leave this level out: actor, rollout and model are sections themselves.",
    "deepspeed": "Set backend=deepspeed and backend.zero_stage; the trainer writes DeepSpeed's own configuration.",
    "flash_attn": "Set model.attn_implementation=flash_attention_2.",
    "reward_model.enable": A_REWARD_MODEL,
    "reward.reward_model.enable": A_REWARD_MODEL,
    "actor.optim.lr_warmup_steps_ratio": WARMUP,
    "lr_warmup_ratio": WARMUP,
    "warmup_ratio": WARMUP,
    "critic.optim.lr_warmup_steps_ratio": "Set critic.optim.lr_warmup_steps, a number of optimizer steps.",
    "actor.fsdp_config.dtype": DTYPES,
    "critic.fsdp.dtype": DTYPES,
    "critic.fsdp.model_dtype": DTYPES,
    "dtype": DTYPES,
    "model.dtype": DTYPES,
    "model.torch_dtype": DTYPES,
    "torch_dtype": DTYPES,
    "actor.fsdp_config.model_dtype": DTYPES,
    "apply_chat_template": "Prompts are always rendered with the model's chat template, or model.chat_template.",
    "data.apply_chat_template": "Prompts are always rendered with the model's chat template, or model.chat_template.",
    "load_checkpoint": SAME_COMMAND,
    "resume": SAME_COMMAND,
    "resume_from_checkpoint": SAME_COMMAND,
    "trainer.val_only": VALIDATED,
    "val_only": VALIDATED,
    "trainer.validation_data_dir": "All samples of an evaluation are in samples/step_N.jsonl of the run directory.",
    **{
        name: f"It counts samples; here a pass takes as many as fit into a number of tokens: set {setting}."
        for name, setting in COUNTED_IN_SAMPLES.items()
    },
}
"""Their names that have no counterpart of one setting, and the sentence about them."""

BEST_OF_K = "verl's rewards the best sample alone; the nearest here is algorithm=pass_at_k, with algorithm.pass_at_k=K."

REMARKS_ON_VALUES = {
    ("algorithm", "grpo_passk"): BEST_OF_K,
    ("algorithm.adv_estimator", "grpo_passk"): BEST_OF_K,
    ("algorithm.normalize_reward", "True"): "OpenRLHF's is algorithm.normalize_reward=running.",
    ("algorithm.normalize_reward", "False"): "Not to normalise is null.",
}
"""A setting (or group) and a value that it has in another trainer, and the sentence about it."""
