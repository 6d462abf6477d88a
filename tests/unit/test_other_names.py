"""Names that users of other trainers type, and the settings that the command then offers."""

import pytest

from rlhf.cli.arguments import parse
from rlhf.compose import compose_config
from rlhf.config.algorithm_table import ESTIMATORS
from rlhf.config.known_settings import SECTIONS, SETTINGS, setting_of
from rlhf.config.library import Library
from rlhf.config.names.hints import hint, likely_choice, nearest_setting, remark
from rlhf.config.names.other_trainers import other_trainers
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError, nearest
from tests.support.refusals import says

OTHERS = other_trainers()

# The settings of examples/grpo_trainer/run_qwen2_5_7b_math.sh and of its neighbours in verl, in their order.
VERL_SCRIPT = """algorithm.adv_estimator data.train_files data.val_files data.train_batch_size data.max_prompt_length
data.max_response_length data.filter_overlong_prompts data.truncation actor_rollout_ref.model.path
actor_rollout_ref.actor.optim.lr actor_rollout_ref.model.use_remove_padding
actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type
actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.model.enable_gradient_checkpointing
actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu actor_rollout_ref.rollout.tensor_model_parallel_size
actor_rollout_ref.rollout.name actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.n
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu actor_rollout_ref.ref.fsdp_config.param_offload
algorithm.use_kl_in_reward trainer.critic_warmup trainer.logger trainer.project_name trainer.experiment_name
trainer.n_gpus_per_node trainer.nnodes trainer.save_freq trainer.test_freq trainer.total_epochs"""


def test_offered_settings_exist():
    groups = {*Library.find(None).groups, "recipes"}
    offered = set(OTHERS.settings.values())
    assert {name for name in offered if not setting_of(name)} <= groups | SECTIONS


def test_names_in_the_table_are_not_settings_of_this_trainer():
    typed = {*OTHERS.settings, *OTHERS.remarks}
    assert not typed & {*SETTINGS, "recipes"}
    assert not OTHERS.settings.keys() & OTHERS.remarks.keys()


def test_settings_in_remarks_exist():
    words = {word.strip(".,;()'") for text in OTHERS.remarks.values() for word in text.split()}
    names = {word.partition("=")[0].strip("'") for word in words if word.split(".")[0] in SECTIONS and "." in word}
    assert {name for name in names if not setting_of(name)} == set()


def test_offered_values_are_valid_choices():
    choices = {choice for setting in SETTINGS.values() for choice in setting.metadata["choices"]}
    assert set(OTHERS.values.values()) <= choices | ESTIMATORS.keys() | set(Library.find(None).entries("algorithm"))


def test_remarks_on_values_name_existing_settings_and_invalid_values():
    groups = Library.find(None).groups
    for key, value in OTHERS.value_remarks:
        setting = SETTINGS.get(key)
        assert key in groups or setting is not None
        assert value not in {*ESTIMATORS, *(() if setting is None else setting.metadata["choices"])}


@pytest.mark.parametrize("key", VERL_SCRIPT.split())
def test_every_setting_of_a_script_of_verls_has_an_answer(key):
    own = key.removeprefix("actor_rollout_ref.")
    assert own in SETTINGS or own in OTHERS.settings or own in OTHERS.remarks
    assert key in SETTINGS or hint(key)


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("trainer.n_gpus_per_node", "trainer.nproc"),
        ("data.truncation", "data.overlong_prompts"),
        ("learning_rate", "actor.optim.lr"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optim.lr"),
        ("actor_rollout_ref.model.path", "model.path"),
        ("num_generations", "rollout.n"),
        ("pretrain", "model.path"),
        ("ds.zero_stage", "backend.zero_stage"),
        ("tracking.wandb.project", "trainer.project_name"),
        ("actor_rollout_ref.model.lora.adapter_path", "model.lora.path"),
        ("model.lora.r", "model.lora.rank"),
        ("critic.checkpoint.save_contents", "checkpoint.contents"),
        ("critic.optim.clip_grad", "critic.grad_clip"),
        ("adam_betas", "actor.optim.betas"),
        ("delta", "actor.clip_ratio_c"),
        ("eval_temperature", "rollout.val_kwargs.temperature"),
        ("num_generations_eval", "rollout.val_kwargs.n"),
        ("vllm_max_model_length", "rollout.engine_kwargs.vllm.max_model_len"),
    ],
)
def test_a_name_of_another_trainer_gets_the_matching_setting(typed, ours):
    assert nearest_setting(typed) == ours
    assert hint(typed) == f" Did you mean {ours}?"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("use_adaptive_entropy", "actor.entropy_ctrl.type=adaptive"),
        ("model.load_in_4bit", "model.lora.base_dtype"),
        ("actor_rollout_ref.rollout.layered_summon", "Leave it out"),
        (
            "algorithm.rollout_correction.bypass_mode",
            "Leave it out: the training engine always computes the old log-probs",
        ),
        ("actor_rollout_ref.rollout.load_format", "Leave it out"),
    ],
)
def test_names_without_a_matching_setting_get_a_remark(typed, meant):
    assert meant in remark(typed)


@pytest.mark.parametrize("typed", ["actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio", "eps_clip", "epsilon"])
def test_the_clip_of_both_sides_is_never_the_dual_clip(typed):
    assert remark(typed) == "It clips on both sides; set actor.clip_ratio_low and actor.clip_ratio_high."
    assert "clip_ratio_c" not in hint(typed)


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor.ppo_max_token_len_per_gpu"),
        ("critic.forward_micro_batch_size_per_gpu", "critic.forward_max_token_len_per_gpu"),
        ("micro_train_batch_size", "actor.ppo_max_token_len_per_gpu"),
    ],
)
def test_a_number_of_samples_is_not_taken_for_one_of_tokens(typed, ours):
    assert hint(typed) == (f" That setting counts samples; here, a token budget limits each pass. Set {ours}.")


@pytest.mark.parametrize(
    "typed", ["model.torch_dtype", "actor_rollout_ref.actor.fsdp_config.model_dtype", "torch_dtype"]
)
def test_a_dtype_of_the_whole_model_gets_both_precision_settings(typed):
    assert "backend.autocast=bfloat16" in hint(typed)
    assert "rollout.dtype" in hint(typed)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("actor_rollout_ref.rollout.mode", "rollout=vllm_server"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "no sequence parallelism"),
        ("reward.reward_model.enable", "add reward_model to reward.functions"),
        ("dtype", "backend.autocast=bfloat16"),
        ("ds_tensor_parallel_size", "backend.zero_stage=3"),
        ("load_checkpoint", "The same command again resumes the run"),
    ],
)
def test_a_name_without_counterpart_gets_no_similarly_spelled_suggestion(typed, message):
    assert message in hint(typed)
    assert "Did you mean" not in hint(typed)


RATIOS = "algorithm.rollout_correction.rollout_is_threshold"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (f'{RATIOS}="0.5_5.0"', f"{RATIOS}=0.5_5.0: must be a number. Write {RATIOS}_lower=0.5 {RATIOS}=5.0."),
        (f"{RATIOS}=a_lot_more", f"{RATIOS}=a_lot_more: must be a number."),
        (
            "algorithm=grpo_passk",
            "verl's grpo_passk rewards only the best sample; the nearest here is algorithm=pass_at_k",
        ),
        ("algorithm.adv_estimator=grpo_passk", "the nearest here is algorithm=pass_at_k, with algorithm.pass_at_k=K."),
        ("algorithm.adv_estimator=rloo_vectorized", "Did you mean rloo?"),
        ("algorithm.normalize_reward=true", "For OpenRLHF's normalization, set algorithm.normalize_reward=running."),
        ("algorithm.normalize_reward=false", "null disables the normalization."),
    ],
)
def test_a_value_in_the_syntax_of_verl_or_openrlhf_gets_a_hint(typed, message):
    with pytest.raises(UserError) as raised:
        validate(compose_config([typed], Library.find(None)), {})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("typed", "facts"),
    [
        ("num_processes", ["trainer.nproc"]),
        ("num_machines", ["trainer.nnodes"]),
        ("main_process_port", ["torchrun"]),
        ("mixed_precision", ["backend.autocast"]),
        ("fsdp_version", ["backend=fsdp2"]),
        ("fsdp", ["backend=fsdp2", "actor.fsdp_config.param_offload"]),
        ("offload_optimizer_device", ["backend.offload_optimizer"]),
        ("push_to_hub", ["rlhf.checkpoint push"]),
        ("peft_config", ["model.lora.enabled=true", "model.lora.rank"]),
        ("callbacks", ["trainer.callbacks"]),
        ("tools", ["env.classes=[FILE.py:CLASS]"]),
        ("environment_factory", ["env.classes=[FILE.py:CLASS]"]),
        ("max_tool_calling_iterations", ["env.max_turns"]),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", ["env.classes=[FILE.py:CLASS]"]),
        ("rollout.multi_turn.max_assistant_turns", ["env.max_turns"]),
        ("best_of_n", ["algorithm=pass_at_k"]),
        ("ddp_timeout", ["trainer.collective_timeout_s"]),
        ("disable_dropout", ["dropouts of config.json to 0", "model.lora.dropout"]),
        ("top_entropy_quantile", ["actor.policy_loss.loss_mode=FILE.py:NAME"]),
        ("data.image_key", ["text"]),
        ("data.sampler.class_name", ["data.shuffle"]),
        ("data.sampler.class_path", ["data.shuffle"]),
        ("val_kwargs.do_sample", ["greedy", "rollout.val_kwargs.temperature"]),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample", ["greedy", "rollout.val_kwargs.temperature"]),
        ("loss_type", ["actor.loss_agg_mode=token-mean", "algorithm=dr_grpo"]),
        ("advantage_estimator", ["algorithm=grpo", "algorithm=ppo"]),
        ("actor.num_generations", ["rollout.n"]),
        ("fsdp_config.fsdp_sharding_strategy", ["backend.reshard_after_forward", "backend.dp_replicate"]),
        ("fsdp_config.fsdp_offload_params", ["actor.fsdp_config.param_offload"]),
        ("fsdp_config.fsdp_auto_wrap_policy", ["Leave it out", "each layer"]),
        ("fsdp_config.fsdp_version", ["backend=fsdp2"]),
        ("fsdp_config.fsdp_activation_checkpointing", ["model.enable_gradient_checkpointing"]),
        ("fsdp_config.fsdp_state_dict_type", ["Leave it out", "any number of ranks"]),
        ("fsdp_config.fsdp_backward_prefetch", ["Leave it out"]),
        ("fsdp_config.fsdp_cpu_ram_efficient_loading", ["model.loading", "broadcast"]),
        ("fsdp_config.fsdp_sync_module_states", ["model.loading", "broadcast"]),
        ("fsdp_config.fsdp_use_orig_params", ["Leave it out"]),
        ("deepspeed_config.zero_stage", ["backend.zero_stage"]),
        ("deepspeed_config.offload_optimizer_device", ["backend.offload_optimizer"]),
        ("deepspeed_config.gradient_accumulation_steps", ["actor.ppo_mini_batch_size"]),
        ("deepspeed_config.zero3_init_flag", ["backend=deepspeed"]),
        ("zero_optimization.stage", ["backend.zero_stage"]),
        ("zero_optimization.offload_optimizer.device", ["backend.offload_optimizer"]),
        ("zero_optimization.offload_param.device", ["actor.fsdp_config.param_offload"]),
        ("zero_optimization.overlap_comm", ["backend=deepspeed"]),
        ("gradient_clipping", ["actor.grad_clip"]),
        ("train_micro_batch_size_per_gpu", ["actor.ppo_max_token_len_per_gpu"]),
        ("bf16.enabled", ["backend.autocast=bfloat16"]),
        ("fp16.enabled", ["float16 is not available"]),
        ("fp16", ["float16 is not available"]),
        ("distributed_type", ["backend=deepspeed"]),
        ("use_vllm", ["rollout=vllm", "rollout=vllm_server"]),
        ("vllm_server_host", ["rollout.servers.urls"]),
        ("per_device_train_batch_size", ["data.train_batch_size", "num_generations"]),
        ("trainer.per_device_train_batch_size", ["data.train_batch_size", "num_generations"]),
        ("trainer.gradient_accumulation_steps", [OTHERS.remarks["gradient_accumulation_steps"]]),
        ("actor.optim.warmup_ratio", ["actor.optim.lr_warmup_steps"]),
        ("critic.optim.warmup_ratio", ["critic.optim.lr_warmup_steps"]),
        ("peft_config.r", ["model.lora.rank?"]),
        ("peft_config.lora_alpha", ["model.lora.alpha?"]),
        ("lora_config.target_modules", ["model.lora.target_modules?"]),
        ("model.name", ["model.path?"]),
        ("model_name", ["model.path?"]),
        ("num_ppo_epochs", ["actor.ppo_epochs"]),
        ("num_mini_batches", ["actor.ppo_mini_batch_size"]),
        ("total_episodes", ["trainer.total_epochs", "trainer.total_training_steps"]),
        ("vf_coef", ["critic.optim.lr"]),
        ("missing_eos_penalty", ["algorithm.mask_truncated_responses=true"]),
        ("stop_token", ["rollout.stop"]),
        ("exp_name", ["trainer.experiment_name"]),
        ("overwrite_output_dir", ["trainer.overwrite"]),
        ("use_liger_loss", ["backend.use_liger"]),
        ("wandb_mode", ["tracking.wandb.mode"]),
        ("ray_init.num_cpus", ["without Ray", "trainer.nproc"]),
        ("trainer.ray_wait_register_center_timeout", ["without Ray"]),
        ("actor_rollout_ref.hybrid_engine", ["Leave it out"]),
        ("actor_rollout_ref.model.external_lib", ["model.trust_remote_code"]),
        ("actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params", ["Leave it out"]),
        ("data.tokenizer", ["model.path", "model.chat_template"]),
        ("data.max_length", ["data.max_response_length"]),
        ("rollout.nn", ["rollout.n?"]),
    ],
)
def test_names_from_other_trainers_get_hints(typed, facts):
    says(hint(typed), *facts)


@pytest.mark.parametrize(
    "typed",
    ["actor.profiler.enable", "transfer_queue.enable", "amp.enabled", "scheduler.type", "reward_manager.name"],
)
def test_a_general_word_is_not_taken_for_the_same_word_of_another_section(typed):
    assert hint(typed) == ""


def test_a_general_word_of_a_similar_section_gets_the_matching_setting():
    says(hint("reward_model.overlong_buffer.enable"), "reward.overlong_buffer.enable")


@pytest.mark.parametrize(("suffix", "ours"), [("", "model.path="), (".jsonl", "data.train_files=")])
def test_a_path_without_a_setting_gets_the_setting_to_write(tmp_path, suffix, ours):
    path = tmp_path / f"mine{suffix}"
    if suffix:
        path.write_text("")
    else:
        path.mkdir()
        (path / "config.json").write_text("{}")
    with pytest.raises(UserError) as raised:
        compose_config([str(path)], Library.find(None))
    says(str(raised.value), f"write {ours}{path}.")


def test_the_option_model_gets_model_path_as_suggestion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError) as raised:
        parse(["--model", "mine"])
    says(str(raised.value), "Did you mean model.path=mine?")


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["algorithm=gpro"], ["Did you mean grpo?"]),
        (["algorithm=gae"], ["Did you mean ppo?"]),
        (["actor.loss_agg_mode=dr_grpo"], ["algorithm=dr_grpo"]),
        (["--advantage_estimator", "gae"], ["algorithm=ppo"]),
        (["--loss_type=dr_grpo"], ["algorithm=dr_grpo"]),
    ],
)
def test_values_from_other_trainers_get_hints(argv, facts):
    with pytest.raises(UserError) as raised:
        validate(compose_config(parse(argv).overrides, Library.find(None)), {})
    says(str(raised.value), *facts)


def test_a_share_of_the_steps_is_not_offered_as_their_number():
    assert hint("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio").endswith("a number of optimizer steps.")


def test_a_value_with_another_meaning_is_not_suggested():
    assert likely_choice("gpu", ("auto", "cpu", "cuda")) == "cuda"
    assert likely_choice("gpu", ("cpu",)) is None
    assert nearest("gpu", ("cpu",)) is None
    assert likely_choice("bf16", ("none", "bfloat16")) == "bfloat16"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--trainer.nproc=2"],
            "--trainer.nproc=2: settings are written without dashes. Did you mean trainer.nproc=2?",
        ),
        (["--learning_rate", "1e-6"], "--learning_rate 1e-6: settings are written without dashes. Did you mean actor."),
        (
            ["--num-generations=8"],
            "--num-generations=8: settings are written without dashes. Did you mean rollout.n=8?",
        ),
        (["--recipes", "minimal"], "--recipes minimal: settings are written without dashes. Did you mean recipes=min"),
        (["--model", "a/b"], "--model a/b: settings are written without dashes. Did you mean model.path=a/b?"),
        (["--eps_clip", "0.2"], "--eps_clip 0.2: there is no such option. It clips on both sides;"),
        (
            ["--config-name", "x"],
            "--config-name x: there is no such option. Select a named experiment with recipes=",
        ),
        (["--hlep"], "--hlep: there is no such option. Did you mean --help?"),
        (["--zzz"], "--zzz: there is no such option. --help shows the usage."),
    ],
)
def test_settings_written_as_options(argv, message):
    with pytest.raises(UserError) as raised:
        parse(["rollout.n=4", *argv, "trainer.seed=1"])
    assert str(raised.value).startswith(message)


def test_options_and_overrides_in_any_order():
    found = parse(["a=1", "--cfg", "job", "b=2", "-m", "--config-dir=x", "c=-1"])
    assert (found.overrides, found.cfg, found.multirun, str(found.config_dir)) == (
        ["a=1", "b=2", "c=-1"],
        "job",
        True,
        "x",
    )


def test_no_argument_at_all_is_the_default_job():
    """The README's first command has no argument."""
    assert parse([]).overrides == []
