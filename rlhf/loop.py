"""The training loop. It reads like the algorithm; how each part works, and when it is due, is that part's business."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.table import ALGORITHMS
from rlhf.backends.base import FrozenPolicy, TrainingBackend
from rlhf.backends.update import compute_log_probs, needs_old_log_probs, update_policy
from rlhf.batch import collate
from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.driver_state import DriverState
from rlhf.config import Config
from rlhf.distributed import all_max, all_sum
from rlhf.errors import Preempted
from rlhf.evaluation import Evaluator
from rlhf.events import announce
from rlhf.metrics import step_metrics
from rlhf.policy_sampler import PolicySampler
from rlhf.prompt_share import PromptShare
from rlhf.reward import Reward, RewardItem
from rlhf.rollout import SamplingParams
from rlhf.tracking.run_log import RunLog


@dataclass
class Parts:
    """Everything that one rank trains with; built by the worker."""

    config: Config
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    coordinator: Coordinator
    prompts: PromptShare
    sampler: PolicySampler
    params: SamplingParams
    reward: Reward
    actor: TrainingBackend
    reference: FrozenPolicy | None
    evaluator: Evaluator
    checkpointer: Checkpointer
    run_log: RunLog
    driver: DriverState
    stop_requested: Callable[[], bool]
    """Whether any rank was asked to leave; collective."""


def train(p: Parts) -> None:
    """Train from where `p.driver` stands to its last step. Collective; raises Preempted after a save when asked to stop."""
    actor_config, algorithm, driver = p.config.actor, ALGORITHMS[p.config.algorithm.adv_estimator], p.driver
    micro_batch_size = actor_config.ppo_micro_batch_size_per_gpu
    if driver.step == 0:
        p.run_log.step(0, p.evaluator.before_training())
    while driver.step < driver.total_steps:
        step, started = driver.step + 1, time.monotonic()
        announce("step.begin")
        prompts, requests = p.prompts.next()

        announce("rollout.before")
        samples = p.sampler.generate(requests, p.params, version=driver.step, step=step)
        announce("rollout.after")
        generated = time.monotonic()

        texts = p.tokenizer.batch_decode([s.token_ids for s in samples], skip_special_tokens=True)
        owners = [prompt for prompt in prompts for _ in range(p.params.n)]
        items = [RewardItem(o.data_source, t, o.ground_truth, o.extra_info) for o, t in zip(owners, texts, strict=True)]
        results = p.reward.score(items)
        batch = collate(requests, samples, p.tokenizer.pad_token_id, p.device)
        batch.scores = torch.tensor([r.score for r in results], dtype=torch.float32, device=p.device)
        metrics, tokens = step_metrics(batch, results, p.params.max_tokens, p.coordinator)
        rewarded = time.monotonic()

        announce("update.before")
        if p.reference is not None:
            batch.ref_log_probs = compute_log_probs(p.reference, batch, micro_batch_size)
        if needs_old_log_probs(actor_config, p.config.data.train_batch_size):
            batch.old_log_probs = compute_log_probs(p.actor, batch, micro_batch_size)
        batch.advantages = algorithm.advantages(batch.scores, p.params.n, p.config.algorithm)
        metrics |= update_policy(p.actor, batch, actor_config, p.prompts.mini_batches, all_sum, all_max)
        announce("update.after")

        seconds = time.monotonic() - started
        driver.finish_step(tokens, len(samples) * p.coordinator.world_size, seconds)
        metrics |= {
            "data/epoch": p.prompts.epoch,
            "tokens/total": driver.tokens,
            "perf/step_seconds": seconds,
            "perf/rollout_seconds": generated - started,
            "perf/reward_seconds": rewarded - generated,
            "perf/update_seconds": started + seconds - rewarded,
            "perf/tokens_per_second": tokens / seconds,
        }
        last = step == driver.total_steps
        metrics |= p.evaluator.maybe_evaluate(step, last=last)
        driver.note_accuracy(metrics.get("val/accuracy"))
        # Before the checkpoint: a record that is missing for a committed step could never be made up for.
        p.run_log.step(step, metrics)
        p.run_log.saved(p.checkpointer.maybe_save(step, last=last))
        if p.stop_requested() and not last:
            p.run_log.saved(p.checkpointer.save(step))
            raise Preempted(f"Asked to stop: saved step {step} and left; the same command goes on from there.")
