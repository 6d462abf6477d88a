"""Configurations that are accepted or rejected, and the message of each rejection."""

from typing import Any

import pytest

from rlhf.compose import compose_config
from rlhf.config.known_settings import SETTINGS
from rlhf.config.library import Library
from rlhf.config.rules.idle_settings import NEEDS, idle_settings
from rlhf.config.rules.validate import validate
from tests.support.commands import compose
from tests.support.configurations import make, problems
from tests.support.refusals import says

SERVED: dict[str, Any] = {"rollout__name": "vllm_server", "rollout__servers__urls": ["http://node7:8000"]}


CORRECTION = "algorithm__rollout_correction__"
ACCEPTED: dict[str, dict] = {
    "defaults": {},
    "several optimizer steps": {"actor__ppo_mini_batch_size": 16},
    "greedy evaluation": {"rollout__val_kwargs__temperature": 0.0},
    "save only a model for others": {"checkpoint__contents": ["hf_model"]},
    "save it as large as it was": {"checkpoint__contents": ["hf_model"], "checkpoint__hf_dtype": "float32"},
    "save it small beside the weights": {
        "checkpoint__contents": ["model", "hf_model"],
        "checkpoint__hf_dtype": "bfloat16",
    },
    "save it small and never go on": {
        "checkpoint__contents": ["hf_model"],
        "checkpoint__hf_dtype": "float16",
        "trainer__resume_mode": "disable",
    },
    "no resume, no model": {"trainer__resume_mode": "disable", "checkpoint__contents": ["optimizer"]},
    "three rules of retention": {"checkpoint__keep_every": 100, "checkpoint__keep_best": 2},
    "a remote folder": {"checkpoint__remote": "file:///backup", "checkpoint__remote_max_to_keep": 1},
    "HDFS": {"checkpoint__remote": "hdfs://namenode:8020/backup"},
    "all trackers": {"trainer__logger": ["console", "jsonl", "wandb", "tensorboard", "mlflow"]},
    "warm-up of all but one step": {"trainer__total_training_steps": 10, "actor__optim__lr_warmup_steps": 9},
    "warm-up counts optimizer steps": {
        "trainer__total_training_steps": 10,
        "actor__ppo_mini_batch_size": 32,
        "actor__optim__lr_warmup_steps": 19,
    },
    "warm-up counts training steps": {
        "trainer__total_training_steps": 10,
        "actor__ppo_mini_batch_size": 32,
        "actor__optim__lr_scheduler_interval": "training_step",
        "actor__optim__lr_warmup_steps": 9,
    },
    "several files": {"data__train_files": ["a.jsonl", "b/*.parquet"]},
    "the policy's warm-up counts its own steps": {
        "trainer__total_training_steps": 10,
        "algorithm__adv_estimator": "gae",
        "trainer__critic_warmup": 4,
        "actor__optim__lr_warmup_steps": 5,
        "critic__optim__lr_warmup_steps": 9,
    },
    "a critic with more epochs has more steps": {
        "trainer__total_training_steps": 10,
        "critic__ppo_epochs": 2,
        "critic__optim__lr_warmup_steps": 19,
    },
    "no low clip": {"actor__clip_ratio_low": 1.0},
    "one step ahead": SERVED
    | {
        "rollout__async_steps": 1,
        "algorithm__rollout_correction__rollout_is": "sequence",
    },
    "a fixed length for the policy": {
        "actor__loss_scale_factor": 100,
        "actor__loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "a fixed length for the critic": {
        "actor__loss_scale_factor": 100,
        "critic__loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "punished length": {"reward__overlong_buffer__enable": True, "reward__overlong_buffer__len": 255},
    "a buffer that is off": {"reward__overlong_buffer__len": 1000},
    "KL in reward and loss": {"actor__use_kl_loss": True, "algorithm__use_kl_in_reward": True},
    "an adaptive coefficient": {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
    "rewards normalised": {"algorithm__normalize_reward": "running", "algorithm__norm_adv_by_std_in_grpo": False},
    "rewards clipped": {"algorithm__normalize_reward": "batch", "algorithm__reward_clip_range": [-1.0, 1.0]},
    "a bonus that follows the entropy": {"actor__entropy_ctrl__type": "adaptive", "actor__calculate_entropy": False},
    "rejection": {
        CORRECTION + "rollout_is": "token",
        CORRECTION + "rollout_is_threshold_lower": 0.5,
        CORRECTION + "rollout_rs": "seq_mean_k1",
        CORRECTION + "rollout_rs_threshold": 1.001,
        CORRECTION + "rollout_rs_threshold_lower": 0.99,
    },
    "dynamic sampling": {"algorithm__filter_groups__enable": True, "data__gen_batch_size": 7},
    "rollback": {"guards__action": "rollback"},
    "rollback with an export": {
        "guards__action": "rollback",
        "checkpoint__contents": ["hf_model", "extra", "optimizer", "model"],
    },
    "servers that run already": SERVED
    | {
        "rollout__engine_kwargs__vllm": {"kv_cache_dtype": "fp8"},
        "rollout__structured_outputs": {"regex": "[0-9]+", "disable_any_whitespace": True},
    },
    "a reward model": {"reward__functions": ["exact_match", "reward_model"], "reward_model__path": "org/judge"},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_valid_configurations_are_accepted(changes):
    validate(make(**changes), {})


@pytest.mark.parametrize(
    ("load", "action", "message"),
    [
        (["hf_model"], "skip", ""),
        (["model", "optimizer", "extra"], "rollback", ""),
        (["model"], "rollback", "checkpoint.load_contents=['model']: guards.action=rollback"),
        (["extra"], "skip", "checkpoint.load_contents=['extra']: needs model or hf_model"),
        (["model", "modle"], "skip", "checkpoint.load_contents=['model', 'modle']: 'modle'"),
    ],
)
def test_load_contents_may_list_parts_that_the_run_does_not_save(tmp_path, load, action, message):
    source = tmp_path / "global_step_3"
    source.mkdir()
    (source / "manifest.json").touch()
    begins = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(source)}
    config = make(**begins, checkpoint__load_contents=load, guards__action=action)
    if message:
        assert message in "\n".join(problems(config))
    else:
        validate(config, {})


REJECTED: list[tuple[dict, str]] = [
    ({"trainer__nproc": 0}, "trainer.nproc=0: must be at least 1."),
    ({"trainer__save_freq": -1}, "trainer.save_freq=-1: must be at least 0; 0 means never."),
    ({"data__val_max_samples": -1}, "data.val_max_samples=-1: must be at least 1; null means all."),
    ({"trainer__save_freq": -2}, "trainer.save_freq=-2: must be at least 0."),
    ({"actor__optim__lr": 0.0}, "actor.optim.lr=0.0: must be greater than 0."),
    ({"actor__optim__lr": float("nan")}, "actor.optim.lr=nan: must be a finite number."),
    ({"trainer__seed": 2**32}, "trainer.seed=4294967296: must be at most 4294967295."),
    ({"rollout__top_p": 1.5}, "rollout.top_p=1.5: must be at most 1."),
    (
        {"actor__kl_loss_type": "k33"},
        "actor.kl_loss_type=k33: must be one of k1, k2, k3, abs, k1+, k3+, abs+. Did you mean k3?",
    ),
    (
        {"actor__ppo_mini_batch_size": 48},
        "actor.ppo_mini_batch_size=48 must divide data.train_batch_size=64: "
        "set actor.ppo_mini_batch_size=32 or data.train_batch_size=96.",
    ),
    (
        {"data__train_batch_size": 10},
        "actor.ppo_mini_batch_size=64 must divide data.train_batch_size=10: "
        "set actor.ppo_mini_batch_size=10 or data.train_batch_size=64.",
    ),
    ({"actor__shuffle": True}, "actor.shuffle=true: has no effect, because a step has a single mini-batch"),
    ({"rollout__temperature": 0.0}, "rollout.temperature=0: sampling would be greedy"),
    (
        {"algorithm__adv_estimator": "gae", "rollout__n": 1, "rollout__temperature": 0.0},
        "rollout.temperature=0: sampling would be greedy",
    ),
    ({"rollout__temperature": 1e-40}, "rollout.temperature=1e-40: sampling would be greedy"),
    ({"rollout__top_k": 1}, "rollout.top_k=1: the 8 samples"),
    ({"rollout__min_p": 1.0}, "rollout.min_p=1: the 8 samples"),
    ({"rollout__min_p": 1.5}, "rollout.min_p=1.5: must be at most 1."),
    ({"rollout__sampling_mask": True}, "rollout.sampling_mask=true: no sampling setting excludes tokens; set rollout."),
    ({"rollout__sampling_mask": True, "rollout__top_p": 0.9}, "rollout.top_k=-1: rollout.sampling_mask=true stores"),
    ({"rollout__sampling_mask": True, "rollout__min_p": 0.1, "rollout__top_k": 0}, "set rollout.top_k=50, or rollout."),
    (
        {"rollout__sampling_mask": True, "rollout__top_k": 2049},
        "rollout.top_k=2049: with rollout.sampling_mask=true each token needs memory for 2049 kept tokens, and at most "
        "2048 are possible; set rollout.top_k=50, or rollout.sampling_mask=false.",
    ),
    (
        SERVED
        | {"rollout__sampling_mask": True, "rollout__top_k": 2048, "rollout__val_kwargs__top_k": 151_936}
        | {"rollout__val_kwargs__temperature": 1.0},
        "rollout.val_kwargs.top_k=151936: with rollout.sampling_mask=true each token needs memory for 151936 kept",
    ),
    (
        {"rollout__sampling_mask": True, "rollout__top_k": 9, "rollout__repetition_penalty": 1.1},
        "rollout.repetition_penalty=1.1: the update ignores it, so rollout.sampling_mask=true would not remove the",
    ),
    (
        {"rollout__sampling_mask": True, "rollout__top_k": 1, "rollout__n": 1, "algorithm__adv_estimator": "gae"},
        "rollout.top_k=1: with rollout.sampling_mask=true each mask has a single token",
    ),
    (
        SERVED | {"rollout__sampling_mask": True, "rollout__top_k": 9, "rollout__val_kwargs__temperature": 1.0},
        "rollout.val_kwargs.top_k=-1: with rollout.sampling_mask=true vLLM's servers reject requests without top_k",
    ),
    ({"rollout__val_kwargs__n": 4}, "rollout.val_kwargs.temperature=0: the 4 samples"),
    (
        {"rollout__val_kwargs__n": 4, "rollout__val_kwargs__temperature": 1.0, "rollout__val_kwargs__top_k": 1},
        "rollout.val_kwargs.top_k=1: the 4 samples",
    ),
    (
        {"rollout__val_kwargs__n": 4, "rollout__val_kwargs__temperature": 1.0, "rollout__val_kwargs__min_p": 1.0},
        "rollout.val_kwargs.min_p=1: the 4 samples",
    ),
    ({"rollout__repetition_penalty": 1e-45}, "rollout.repetition_penalty=1e-45: must be at least 0.01."),
    ({"rollout__stop": [""]}, "rollout.stop=['']: an empty stop string"),
    (
        {"rollout__enforce_eager": True},
        "has effect only with rollout=vllm or rollout=vllm_server (it is embedded); set rollout=vllm, or "
        "rollout.enforce_eager=false.",
    ),
    (
        {"rollout__sleep_level": 1},
        "rollout.sleep_level=1: has effect only with rollout=vllm (it is embedded); set rollout=vllm, or",
    ),
    (
        SERVED | {"rollout__sleep_level": 0},
        "rollout.sleep_level=0: has effect only with rollout=vllm (it is vllm_server); set rollout=vllm, or",
    ),
    (
        SERVED
        | {
            "rollout__async_steps": 1,
            "algorithm__rollout_correction__rollout_is": "token",
            "rollout__max_staleness": 0,
        },
        "rollout.max_staleness=0: with rollout.async_steps=1 tokens are up to 1 steps old when they are trained on; "
        "set rollout.max_staleness=1, or rollout.async_steps=0",
    ),
    (
        {CORRECTION + "rollout_is_threshold_lower": 0.5},
        "algorithm.rollout_correction.rollout_is_threshold_lower=0.5: has effect only with "
        "algorithm.rollout_correction.rollout_is; set algorithm.rollout_correction.rollout_is=token, or",
    ),
    (
        {CORRECTION + "rollout_is": "token", CORRECTION + "rollout_is_threshold_lower": 3.0},
        "rollout_is_threshold_lower=3.0: must be less than algorithm.rollout_correction.rollout_is_threshold=2.0.",
    ),
    (
        {CORRECTION + "rollout_rs_threshold": 2.0},
        "rollout_rs_threshold=2.0: has effect only with algorithm.rollout_corr",
    ),
    (
        {CORRECTION + "rollout_rs": "seq_max_k3"},
        "rollout_rs=seq_max_k3: needs a bound; set algorithm.rollout_correction.",
    ),
    (
        {CORRECTION + "rollout_rs": "token_k1", CORRECTION + "rollout_rs_threshold": 0.5},
        "rollout_rs_threshold=0.5: is the largest ratio of token_k1, and must be more than the smallest ratio, 2 (1 ",
    ),
    (
        {
            CORRECTION + "rollout_rs": "token_k3",
            CORRECTION + "rollout_rs_threshold": 0.5,
            CORRECTION + "rollout_rs_threshold_lower": 0.4,
        },
        "rollout_rs_threshold_lower=0.4: has effect only with a k1 measure (rollout_rs=token_k3)",
    ),
    (
        {"actor__entropy_ctrl__target_entropy": 0.5},
        "actor.entropy_ctrl.target_entropy=0.5: has effect only with actor.entropy_ctrl.type=adaptive; set",
    ),
    (
        {"actor__entropy_ctrl__type": "adaptive", "actor__entropy_coeff": 0.3, "actor__entropy_ctrl__max_coeff": 0.1},
        "actor.entropy_coeff=0.3: the starting value of the adaptive coefficient must be within",
    ),
    (
        {
            "actor__entropy_ctrl__type": "adaptive",
            "actor__entropy_ctrl__min_coeff": 1.0,
            "actor__entropy_ctrl__max_coeff": 0.1,
        },
        "actor.entropy_ctrl.min_coeff=1.0: must be at most actor.entropy_ctrl.max_coeff=0.1.",
    ),
    (
        {"actor__optim__decay_norm_and_bias": True, "actor__optim__weight_decay": 0.0},
        "actor.optim.decay_norm_and_bias=true: has effect only with actor.optim.weight_decay above 0; set",
    ),
    ({"backend__offload_optimizer": True}, "set backend=deepspeed, or backend.offload_optimizer=false."),
    (
        {"actor__policy_loss__loss_mode": "clip_cov", "actor__policy_loss__clip_cov_lb": 5.0},
        "actor.policy_loss.clip_cov_lb=5.0: must be less than actor.policy_loss.clip_cov_ub=5.0, or no token is",
    ),
    (
        {"actor__policy_loss__kl_cov_ratio": 0.1},
        "has effect only with actor.policy_loss.loss_mode=kl_cov (it is vanilla)",
    ),
    ({"algorithm__reward_clip_range": [1.0]}, "algorithm.reward_clip_range=[1.0]: must be two numbers, the lower one"),
    ({"algorithm__reward_clip_range": [1.0, -1.0]}, "algorithm.reward_clip_range=[1.0, -1.0]: must be two numbers"),
    (
        {"algorithm__normalize_reward": "batch"},
        "algorithm.normalize_reward=batch: has no effect with grpo, which divides",
    ),
    ({"actor__use_bias_correction_kl": True}, "actor.use_bias_correction_kl=true: has effect only with a KL in the"),
    (
        SERVED | {"rollout__async_steps": 1},
        "algorithm.rollout_correction.rollout_is=null: with rollout.async_steps=1 samples come from an older policy "
        "than the one in training; set algorithm.rollout_correction.rollout_is=token.",
    ),
    (SERVED | {"rollout__engine_kwargs__vllm": {"dtype": "half"}}, "engine_kwargs.vllm.dtype=half: set rollout.dtype"),
    (
        SERVED | {"rollout__engine_kwargs__vllm": {"load_format": "auto"}},
        "load_format=auto: only the trainer may set this",
    ),
    (SERVED | {"rollout__temperature": 2.5}, "rollout.temperature=2.5: must be 0 (greedy), or 0.01 to 2, for vLLM."),
    (SERVED | {"rollout__val_kwargs__temperature": 0.001}, "rollout.val_kwargs.temperature=0.001: must be 0"),
    (
        SERVED
        | {"rollout__structured_outputs": {"regex": "a"}, "rollout__async_steps": 1}
        | {"algorithm__rollout_correction__rollout_is": "token"},
        "whose structure would begin again; set rollout.async_steps=0",
    ),
    (SERVED | {"rollout__structured_outputs": {"regexp": "a"}}, "there is no key regexp. Did you mean regex?"),
    (
        SERVED | {"rollout__structured_outputs": {"regex": "a", "choice": ["a"]}},
        "set exactly one of json, regex, choice",
    ),
    (
        SERVED | {"rollout__structured_outputs": {"disable_any_whitespace": True}},
        "set exactly one of json, regex, choice",
    ),
    ({"rollout__servers__count": 2}, "rollout.servers.count=2: has effect only with rollout=vllm_server"),
    ({"rollout__servers__urls": ["http://node7:8000"]}, "rollout.servers.urls=[http://node7:8000]: has effect only"),
    (
        SERVED | {"rollout__servers__count": 2},
        "rollout.servers.count=2: has effect only with rollout.servers.urls=[]; set",
    ),
    (SERVED | {"rollout__servers__urls": ["node7:8000"]}, "'node7:8000' is not the URL of a server"),
    (SERVED | {"rollout__servers__urls": ["http://:8000"]}, "'http://:8000' is not the URL of a server"),
    (SERVED | {"rollout__servers__urls": ["http://node7:http"]}, "'http://node7:http' is not the URL of a server"),
    (
        SERVED | {"rollout__servers__urls": ["http://a:1", "http://b:1", "http://a:1/"]},
        "http://a:1 is listed 2 times; list each server once.",
    ),
    (
        SERVED | {"rollout__servers__backoff_s": 90.0},
        "rollout.servers.backoff_s=90: is more than rollout.servers.backoff_max_s=60",
    ),
    ({"checkpoint__contents": []}, "checkpoint.contents=[]: nothing to save"),
    ({"trainer__save_freq": 0, "checkpoint__contents": []}, "checkpoint.contents=[]: nothing to save"),
    ({"checkpoint__contents": ["model", "optimiser"]}, "Did you mean optimizer?"),
    ({"checkpoint__contents": ["model", "model"]}, "checkpoint.contents=['model', 'model']: list each name once."),
    ({"checkpoint__contents": ["optimizer", "extra"]}, "add model, or set trainer.resume_mode=disable."),
    (
        {"checkpoint__max_to_keep": None, "checkpoint__keep_every": 100},
        "checkpoint.keep_every=100: has no effect with checkpoint.max_to_keep=null, which keeps all",
    ),
    (
        {"checkpoint__max_to_keep": None, "checkpoint__keep_best": 1},
        "checkpoint.keep_best=1: has no effect with checkpoint.max_to_keep=null, which keeps all",
    ),
    (
        {"checkpoint__keep_best": 2, "trainer__test_freq": 0, "trainer__save_freq": 7},
        "checkpoint.keep_best=2: needs evaluations to rank checkpoints; set trainer.test_freq=7.",
    ),
    (
        {"checkpoint__keep_best": 2, "data__train_files": "a.jsonl"},
        "needs evaluations to rank checkpoints; set data.val_files.",
    ),
    ({"checkpoint__best_metric": "val/acuracy"}, "Did you mean val/accuracy?"),
    ({"checkpoint__remote_max_to_keep": 2}, "has effect only with checkpoint.remote (it is null); set"),
    ({"checkpoint__remote": "bucket/folder"}, "checkpoint.remote=bucket/folder: must begin with s3://, gs://, hdfs://"),
    (
        {"checkpoint__remote": "s3://mykey:hush-hush@bucket/x"},
        "checkpoint.remote=s3://REDACTED@bucket/x: contains a secret, which would be stored in every checkpoint",
    ),
    ({"checkpoint__remote": "gss://bucket"}, "must begin with s3://, gs://, hdfs://, file://. Did you mean gs?"),
    ({"checkpoint__remote": "s3://"}, "must name a whole path, such as s3://bucket/folder."),
    ({"checkpoint__remote": "file://folder"}, "must name a whole path, such as file:///folder."),
    ({"checkpoint__load_contents": ["model"]}, "has effect only with trainer.resume_mode=resume_path (it is auto)"),
    (
        {"checkpoint__journal": True, "checkpoint__contents": ["model"]},
        "without optimizer and extra a resumed run has other weights",
    ),
    ({"trainer__resume_mode": "resume_path"}, "set trainer.resume_from_path to a global_step_N directory."),
    ({"trainer__resume_from_path": "x"}, "trainer.resume_from_path=x: has effect only with"),
    ({"actor__clip_ratio_low": 1.5}, "actor.clip_ratio_low=1.5: must be at most 1"),
    ({"trainer__logger": ["wandbb"]}, "is not one of console, jsonl, mlflow, tensorboard, wandb. Did you mean wandb?"),
    ({"trainer__logger": ["wandb", "wandb"]}, "trainer.logger=['wandb', 'wandb']: list each name once."),
    (
        {"trainer__total_training_steps": 10, "actor__optim__lr_warmup_steps": 10},
        "actor.optim.lr_warmup_steps=10: the run has 10 optimizer steps",
    ),
    (
        {
            "trainer__total_training_steps": 10,
            "actor__ppo_mini_batch_size": 32,
            "actor__optim__lr_scheduler_interval": "training_step",
            "actor__optim__lr_warmup_steps": 10,
        },
        "actor.optim.lr_warmup_steps=10: the run has 10 training steps",
    ),
    ({"trainer__experiment_name": "a/b"}, "trainer.experiment_name='a/b': must be a plain folder name"),
    ({"trainer__experiment_name": ""}, "trainer.experiment_name='': must be a plain folder name"),
    ({"trainer__project_name": ".."}, "trainer.project_name='..': must be a plain folder name"),
    ({"trainer__default_local_dir": ""}, "trainer.default_local_dir='': name the folder"),
    ({"actor__optim__betas": [0.9]}, "actor.optim.betas=[0.9]: must be two numbers"),
    ({"actor__optim__betas": [0.9, 1.0]}, "actor.optim.betas=[0.9, 1.0]: must be two numbers"),
    ({"critic__optim__betas": [0.9]}, "critic.optim.betas=[0.9]: must be two numbers"),
    (
        {
            "algorithm__adv_estimator": "gae",
            "trainer__total_training_steps": 10,
            "trainer__critic_warmup": 4,
            "actor__optim__lr_warmup_steps": 6,
        },
        "actor.optim.lr_warmup_steps=6: the run has 6 optimizer steps",
    ),
    (
        {"trainer__total_training_steps": 10, "critic__optim__lr_warmup_steps": 10},
        "critic.optim.lr_warmup_steps=10: the run has 10 optimizer steps",
    ),
    (
        {"algorithm__adv_estimator": "gae", "trainer__total_training_steps": 10, "trainer__critic_warmup": 10},
        "trainer.critic_warmup=10: the run has 10 steps",
    ),
    (
        {"actor__loss_scale_factor": 100},
        "actor.loss_scale_factor=100: has effect only with actor.loss_agg_mode=seq-mean-token-sum-norm or "
        "critic.loss_agg_mode=seq-mean-token-sum-norm; set actor.loss_agg_mode=",
    ),
    (
        {"reward__overlong_buffer__enable": True, "reward__overlong_buffer__len": 256},
        "reward.overlong_buffer.len=256: must be less than data.max_response_length=256; "
        "set reward.overlong_buffer.len=51, or",
    ),
    (
        {"algorithm__kl_ctrl__type": "adaptive"},
        "algorithm.kl_ctrl.type=adaptive: has effect only with algorithm.use_kl_in_reward=true; set",
    ),
    (
        {
            "algorithm__use_kl_in_reward": True,
            "algorithm__kl_ctrl__type": "adaptive",
            "algorithm__kl_ctrl__kl_coef": 0.0,
        },
        "algorithm.kl_ctrl.kl_coef=0: an adaptive coefficient is multiplied at each step, so 0 stays 0",
    ),
    ({"data__gen_batch_size": 64}, "data.gen_batch_size=64: has effect only with algorithm.filter_groups.enable=true"),
    (
        {"algorithm__adv_estimator": "reinforce_plus_plus", "algorithm__filter_groups__enable": True, "rollout__n": 1},
        "rollout.n=1: algorithm.filter_groups.enable=true drops prompts whose samples all have the same metric",
    ),
    (
        {
            "algorithm__filter_groups__enable": True,
            "data__gen_batch_size": 8,
            "algorithm__filter_groups__max_num_gen_batches": 7,
        },
        "data.gen_batch_size=8: with algorithm.filter_groups.max_num_gen_batches=7 a step has at most 56 prompts",
    ),
    (
        {"guards__action": "rollback", "checkpoint__contents": ["model", "hf_model"]},
        "checkpoint.contents=['model', 'hf_model']: guards.action=rollback needs checkpoints with model, "
        "optimizer and extra; add optimizer, extra, or set guards.action=skip.",
    ),
    (
        {"checkpoint__contents": ["hf_model", "extra"], "checkpoint__hf_dtype": "bfloat16"},
        "checkpoint.hf_dtype=bfloat16: without model in checkpoint.contents a run would resume from rounded weights; "
        "add model, or set checkpoint.hf_dtype=null or trainer.resume_mode=disable.",
    ),
    (
        {"checkpoint__hf_dtype": "float32"},
        "checkpoint.hf_dtype=float32: has effect only with hf_model in checkpoint.contents",
    ),
    (
        {"guards__action": "rollback", "trainer__save_freq": 0},
        "trainer.save_freq=0: guards.action=rollback would return to the start",
    ),
    (
        {"reward_model__path": "org/judge"},
        "reward_model.path=org/judge: has effect only with reward_model in reward.functions; set "
        "reward.functions=[reasoning_gym,reward_model], or reward_model.path=null.",
    ),
    ({"critic__path": ""}, "critic.path='': set a folder in Hugging Face format or a Hub name."),
    ({"data__cache_dir": ""}, "data.cache_dir='': set a folder"),
    (
        {"data__apply_chat_template_kwargs": {"tokenize": False, "enable_thinking": False}},
        "data.apply_chat_template_kwargs.tokenize cannot be set: the trainer sets it. Remove it.",
    ),
    ({"data__train_files": []}, "data.train_files=[]: set a file, a glob or a Hub name"),
    ({"data__val_files": 3}, "data.val_files=3: set a file, a glob or a Hub name"),
    ({"model__path": ""}, "model.path='': set a folder in Hugging Face format or a Hub name."),
    ({"model__path": "/nowhere/at/all"}, "model.path=/nowhere/at/all: there is no such folder. Correct the path."),
    ({"model__chat_template": "nowhere.jinja"}, "model.chat_template=nowhere.jinja: there is no such file. Correct"),
]


@pytest.mark.parametrize(("changes", "message"), REJECTED, ids=[str(changes) for changes, _ in REJECTED])
def test_invalid_configurations_are_rejected(changes, message):
    (line,) = problems(make(**changes))
    assert message in line


def test_vllm_in_the_ranks_has_no_partial_rollouts():
    corrected = {"algorithm__rollout_correction__rollout_is": "token"}
    lines = problems(make(rollout__name="vllm", rollout__async_steps=1, **corrected))
    # Where vLLM is not installed, another line reports that.
    assert any("rollout.async_steps=1: vLLM in the ranks ends each generation before" in line for line in lines)


def test_only_gpus_and_servers_of_vllm_have_sampling_masks():
    masks = {"rollout__sampling_mask": True, "rollout__top_k": 9, "trainer__device": "cpu"}
    lines = problems(make(rollout__name="vllm", **masks))
    assert (
        "rollout.sampling_mask=true: has effect only with rollout=vllm_server or rollout=embedded (it is vllm); set "
        "rollout=vllm_server, or rollout.sampling_mask=false." in lines
    )
    lines = problems(make(rollout__name="vllm_server", **masks))
    assert any("rollout.sampling_mask=true: vLLM returns sampling masks only on GPUs" in line for line in lines)
    validate(make(**SERVED, **masks), {})


def test_all_problems_of_the_settings_are_reported_together():
    lines = problems(make(rollout__top_k=1, trainer__experiment_name="..", actor__optim__betas=[]))
    assert len(lines) == 3


def test_the_number_of_ranks_need_not_divide_the_batches():
    filtering = {"algorithm__filter_groups__enable": True, "data__gen_batch_size": 95}
    for ranks in (3, 7, 64, 1000):
        validate(make(trainer__nproc=ranks, **filtering), {})


def test_most_ranks_need_a_sample_of_each_mini_batch():
    sizes = {"data__train_batch_size": 48, "actor__ppo_mini_batch_size": 4, "rollout__n": 8}
    validate(make(trainer__nproc=64, **sizes), {})
    assert problems(make(trainer__nproc=65, **sizes)) == [
        "actor.ppo_mini_batch_size=4: with rollout.n=8 a mini-batch has 32 samples, so more than half of the ranks "
        "(trainer.nproc=65) would have nothing to train on: set actor.ppo_mini_batch_size=6, or use at most 64 ranks."
    ]
    [problem] = problems(make(trainer__nproc=1000, **sizes))
    assert "set actor.ppo_mini_batch_size=63 and data.train_batch_size=63, or" in problem


def test_torchrun_decides_the_number_of_ranks():
    few = make(data__train_batch_size=1, actor__ppo_mini_batch_size=1, rollout__n=2, trainer__nproc=8)
    assert "WORLD_SIZE of torchrun=5" in problems(few, {"RANK": "0", "WORLD_SIZE": "5"})[0]
    validate(few, {"RANK": "0", "WORLD_SIZE": "4"})


def test_the_number_of_ranks_is_nnodes_times_nproc():
    few = make(data__train_batch_size=1, actor__ppo_mini_batch_size=1, rollout__n=2, trainer__nproc=2)
    few.trainer.nnodes = 2
    validate(few, {})
    few.trainer.nnodes = 3
    assert "(trainer.nnodes times trainer.nproc=6)" in problems(few, {})[0]


def test_a_launcher_with_other_machines_than_the_setting_is_rejected():
    config = make(trainer__nproc=2)
    environ = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    validate(config, environ)  # by default the launcher decides
    config.trainer.nnodes = 2
    validate(config, environ)
    config.trainer.nnodes = 3
    [problem] = problems(config, environ)
    says(problem, "trainer.nnodes=3", "4 ranks")


@pytest.mark.parametrize("ranks", [8, 64, 128, 1000])
def test_the_recipe_of_the_paper_takes_any_number_of_ranks(ranks):
    validate(compose_config(["recipes=dapo_math"], Library.find(None)), {"RANK": "0", "WORLD_SIZE": str(ranks)})


BUDGETS = [
    "actor__ppo_max_token_len_per_gpu",
    "critic__ppo_max_token_len_per_gpu",
    "critic__forward_max_token_len_per_gpu",
    "ref__log_prob_max_token_len_per_gpu",
    "reward_model__forward_max_token_len_per_gpu",
    "rollout__log_prob_max_token_len_per_gpu",
]


@pytest.mark.parametrize("key", BUDGETS)
def test_a_token_budget_must_be_at_least_1_but_may_be_below_a_sample(key):
    assert problems(make(**{key: 0})) == [f"{key.replace('__', '.')}=0: must be at least 1."]
    validate(make(**{key: 1}), {})


def test_trust_remote_code_with_vllm_is_rejected():
    settings = {"rollout__name": "vllm", "model__trust_remote_code": True}
    (found,) = (p for p in problems(make(**settings)) if "trust_remote_code" in p)
    assert found.startswith("model.trust_remote_code=true: rollout=vllm receives the policy's configuration")


def test_tensor_parallel_groups_divide_the_ranks():
    config = make(rollout__name="vllm", rollout__tensor_model_parallel_size=4, trainer__nproc=2)
    found = [p for p in problems(config) if "tensor_model_parallel_size" in p]
    assert found == [
        "rollout.tensor_model_parallel_size=4 must divide the number of ranks (trainer.nproc=2): "
        "set rollout.tensor_model_parallel_size=2."
    ]
    assert "WORLD_SIZE of torchrun=6" in "\n".join(problems(config, {"RANK": "0", "WORLD_SIZE": "6"}))


@pytest.mark.parametrize(
    ("typed", "bound"), [([], 1), (["rollout.async_steps=3"], 3), (["rollout.max_staleness=0"], 0)]
)
def test_the_bound_of_ages_allows_what_async_steps_needs(typed, bound):
    assert compose(*typed).rollout.max_staleness == bound


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"algorithm__kl_ctrl__kl_coef": 0.0, "actor__kl_loss_coef": 0.0}, None),
        ({"algorithm__kl_ctrl__kl_coef": 0.05, "algorithm__use_kl_in_reward": True}, None),
        ({"actor__kl_loss_coef": 0.05, "actor__use_kl_loss": True}, None),
        ({"algorithm__kl_ctrl__kl_coef": 0.05}, "kl_coef=0.05: has effect only with algorithm.use_kl_in_reward=true"),
        ({"actor__kl_loss_coef": 0.05}, "actor.kl_loss_coef=0.05: has effect only with actor.use_kl_loss=true"),
        ({"algorithm__gamma": 0.9}, "algorithm.gamma=0.9: has effect only with algorithm.adv_estimator=gae"),
        ({"algorithm__gamma": 0.9, "algorithm__adv_estimator": "reinforce_plus_plus"}, None),
        ({"algorithm__gamma": 0.9, "algorithm__lam": 0.9, "algorithm__adv_estimator": "mine.py:estimator"}, None),
        ({"algorithm__norm_adv_by_std_in_grpo": False, "algorithm__adv_estimator": "rloo"}, "norm_adv_by_std_in_grpo"),
        ({"actor__clip_ratio_c": 2.0, "actor__policy_loss__loss_mode": "gspo"}, "clip_ratio_c=2.0: has effect only"),
        ({"actor__clip_ratio_low": 0.1, "actor__policy_loss__loss_mode": "sapo"}, "clip_ratio_low=0.1: has effect"),
        ({"actor__clip_ratio_low": 0.1, "actor__policy_loss__loss_mode": "gspo"}, None),
        ({"actor__optim__min_lr_ratio": 0.1}, "set actor.optim.lr_scheduler_type=cosine, or actor.optim.min_lr_ratio"),
        ({"critic__optim__min_lr_ratio": 0.1}, None),
        ({"algorithm__rollout_correction__rollout_is_threshold": 3.0}, "rollout_is_threshold=3.0: has effect only"),
        ({"algorithm__rollout_correction__rollout_is_threshold": 3.0, "rollout__async_steps": 1}, None),
        ({"reward__overlong_buffer__penalty_factor": 0.5}, "reward.overlong_buffer.enable=true"),
        ({"algorithm__filter_groups__metric": "seq_reward"}, "algorithm.filter_groups.enable=true"),
        ({"ref__alpha": 0.5}, "ref.alpha=0.5: has effect only with ref.update_freq"),
        ({"guards__max_events": 2, "guards__action": "stop"}, "guards.max_events=2: has effect only with guards"),
        ({"reward_model__max_length": 64}, "reward_model.max_length=64: has effect only"),
    ],
)
def test_a_setting_that_nothing_reads_is_a_warning(changes, line):
    lines = list(idle_settings(make(**changes)))
    assert len(lines) == (line is not None)
    assert (line or "") in "".join(lines)


def test_a_warning_proposes_settings_that_exist_and_help():
    for keys, needs, holds in NEEDS:
        assert set(keys) <= SETTINGS.keys()
        algorithm = "algorithm=ppo" if needs.startswith("critic.") else "algorithm=grpo"
        config = compose(algorithm, needs, "trainer.total_training_steps=3")
        assert holds(config), needs


@pytest.mark.parametrize("choice", ["recipes", "algorithm"])
def test_recipes_and_algorithms_set_nothing_without_effect(choice):
    library = Library.find(None)
    for name in library.entries(choice):
        required = ("model.path=x", "data.train_files=a.jsonl") if name == "minimal" else ()
        config = compose(f"{choice}={name}", "trainer.total_training_steps=3", *required)
        assert list(idle_settings(config)) == [], name
