"""The training loop: collect a batch, reshard it, estimate advantages, update, evaluate, log, save.

It reads like the algorithm. Left out on purpose, because each is the job of the component that is called:

- cadence: whether a save, an evaluation or an update of the reference is due (`maybe_save`, `maybe_evaluate`,
  `maybe_update`);
- which rank computes on which samples: in `resharder.reshard`. Rewards and advantages are computed on the rank that
  generated a prompt's samples (`rollout`), model passes and updates on the rank that a sample is sent to (`training`);
- dynamic sampling, groups carried over, responses in flight, the journal: in `collector.collect`;
- epochs, mini-batches, micro-batches, the optimizer and the guards before each of its steps: in the two `update`s;
- ranks and devices: every call is collective and returns the same metrics on every rank; a model's tensors are on the
  device inside its `on_device`, and may be in host memory otherwise;
- crashes: they end the process, and the supervisor restarts all ranks from the newest checkpoint or snapshot.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhf.batch import ActorBatch, CriticBatch, RolloutBatch
from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.environments.sessions import EnvironmentPool
from rlhf.errors import UserError
from rlhf.events import announce
from rlhf.experience.collector import Collector
from rlhf.experience.evaluation import Evaluator
from rlhf.experience.shown_samples import RolloutViewer
from rlhf.learning.actor import Actor
from rlhf.learning.credit import Advantages, Credit
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from rlhf.learning.reference import Reference
from rlhf.learning.resharding import SampleResharder, TrainingBatches
from rlhf.learning.utilization import Utilization
from rlhf.ranks.phase_clock import PhaseClock
from rlhf.reward import Reward
from rlhf.rollout import RolloutEngine
from rlhf.tracking.run_log import RunLog


@dataclass
class Components:
    """All components of a rank, which `rlhf.assemble.run` builds."""

    collector: Collector
    resharder: SampleResharder
    engine: RolloutEngine
    actor: Actor
    critic: Critic | None
    critic_warmup: int
    """Steps at the start in which only the critic is trained."""
    reference: Reference | None
    advantages: Advantages
    guards: Guards
    evaluator: Evaluator
    viewer: RolloutViewer
    checkpointer: Checkpointer
    run_log: RunLog
    clock: PhaseClock
    utilization: Utilization
    run_dir: Path
    driver: DriverState
    reward: Reward
    environments: EnvironmentPool | None
    needs_old_log_probs: bool
    samples_per_step: int
    resumed: bool
    """Whether a checkpoint was loaded."""
    stop_requested: Callable[[], bool]
    """Returns whether a stop was requested, or a save failed, on any rank. Collective."""


def train(c: Components) -> None:
    """Train from the step of `c.driver` to the last step. Collective.

    Raises:
        Preempted: a stop was requested, and the run has saved.
        Unsaved: a stop was requested, and the save failed.
        UserError: an error that a restart cannot fix, such as `Guards.settle` or `Collector.collect` raises.
    """
    with c.checkpointer.committing():
        _train(c)
    c.collector.drop_journal(up_to=c.driver.step)


def _train(c: Components) -> None:
    driver = c.driver
    if c.resumed:
        c.run_log.note(c.checkpointer.loaded)
        c.run_log.note(c.checkpointer.save_restored(last=driver.finished, rolls_back=c.guards.rolls_back))
    else:
        before = c.evaluator.before_training()
        c.run_log.step(0, before)
        if c.guards.rolls_back:  # a rollback in step 1 needs a checkpoint
            c.run_log.note(c.checkpointer.save(0, before))
    while not driver.finished:
        step, started = driver.step + 1, time.monotonic()
        announce("step.begin")
        c.collector.skip_to(c.guards.skip_for(step))
        collected = c.collector.collect(step)
        rollout, metrics = collected.batch, collected.metrics
        last = driver.ends_with(step, collected.epochs)

        announce("update.before")
        c.guards.begin(step, metrics["reward/mean"])
        with c.clock.phase("share"):
            training = c.resharder.reshard(rollout, collected.uids, step)
        batches, credit, credit_metrics = estimate(c, rollout, training)
        c.run_log.show(c.viewer.shown(collected.groups, credit.means(rollout.samples)))
        metrics |= credit_metrics | update(c, batches, training, step)
        if c.guards.settle(step, last=last) == "rollback":
            roll_back(c)
            continue
        if c.reference is not None:
            c.reference.maybe_update(c.actor.backend, step)
        announce("update.after")

        timings = c.clock.collect()
        seconds = time.monotonic() - started
        driver.finish_step(collected.tokens.total, c.samples_per_step, seconds, collected.epochs)
        if c.guards.rejected is None:  # a rejection cuts the updates short
            metrics |= c.utilization.metrics(collected.tokens, timings)
        metrics |= (
            timings
            | c.guards.metrics()
            | c.checkpointer.metrics()
            | {
                "tokens/total": driver.tokens,
                "timing_s/step": seconds,
                "perf/tokens_per_second": collected.tokens.total / seconds,
            }
        )
        metrics |= c.evaluator.maybe_evaluate(step, last=last)
        driver.note_accuracy(metrics.get("val/accuracy"))
        # Log before the save: after a crash, nothing could restore a missing record of a committed step.
        c.run_log.step(step, metrics)
        c.run_log.note(c.checkpointer.maybe_save(step, metrics, last=last))
        if c.stop_requested() and not last:
            c.checkpointer.leave(step, metrics)


def estimate(
    c: Components, rollout: RolloutBatch, training: TrainingBatches
) -> tuple[tuple[ActorBatch, CriticBatch | None], Credit, dict[str, float]]:
    """Return the training batches, the credit of the rollout batch, and metrics. Collective."""
    batch, old, ref, values = training.batch, None, None, None
    if c.reference is not None:
        with c.clock.phase("ref"), c.reference.on_device():
            ref = c.reference.all_log_probs(batch, training.balance)
    if c.needs_old_log_probs:
        with c.clock.phase("old_log_prob"), c.actor.on_device():
            old = c.actor.all_log_probs(batch, training.balance)
    if c.critic is not None:
        with c.clock.phase("values"), c.critic.on_device():
            values = c.critic.all_values(batch, training.balance)
    with c.clock.phase("share"):
        rollout_values = None if values is None else training.to_rollout.of_tokens(values)
        policies = None
        if c.advantages.uses_kl and old is not None and ref is not None:
            policies = training.to_rollout.of_tokens(old), training.to_rollout.of_tokens(ref)
    with c.clock.phase("adv"):
        credit, credit_metrics = c.advantages.estimate(rollout, rollout_values, policies, c.guards)
    with c.clock.phase("share"):
        to_training = training.to_training
        mask = batch.response_mask if credit.mask is rollout.response_mask else to_training.of_tokens(credit.mask)
        given = batch.present() | {"response_mask": mask}
        advantages = to_training.of_tokens(credit.advantages)
        actor = ActorBatch(**given, advantages=advantages, loss_mask=mask, old_log_probs=old, ref_log_probs=ref)
        critic = None
        if values is not None and credit.returns is not None:
            given.pop("sampling_mask", None)  # values need no masks, and each epoch may move the batch between ranks
            critic = CriticBatch(**given, values=values, returns=to_training.of_tokens(credit.returns))
    return (actor, critic), credit, credit_metrics


def update(
    c: Components, batches: tuple[ActorBatch, CriticBatch | None], training: TrainingBatches, step: int
) -> dict[str, float]:
    """Train the critic and the actor on `batches` and return metrics. Collective."""
    metrics: dict[str, float] = {}
    of_actor, of_critic = batches
    if c.critic is not None and of_critic is not None:
        with c.clock.phase("update_critic"), c.critic.on_device():
            metrics |= c.critic.update(of_critic, training.balance, c.guards, training.shuffle)
    if step > c.critic_warmup:
        with c.clock.phase("update_actor"), c.actor.on_device():
            metrics |= c.actor.update(of_actor, training.balance, c.guards, training.shuffle)
    return metrics


def roll_back(c: Components) -> None:
    """Load the newest checkpoint, and continue without the prompts of the rejected step. Collective."""
    announce("rollback.before")
    memory = c.guards.remember(c.collector.position)
    c.collector.invalidate_policy()
    c.clock.collect()
    # Resume as after a crash (promise 16).
    if not c.checkpointer.resume():
        raise UserError(
            f"guards.action=rollback: no checkpoint is left in {c.run_dir} to roll back to. Set guards.action=skip, or "
            "checkpoint.on_save_error=stop to end the run at a failed save, and start again."
        )
    c.guards.recall(memory)
    c.run_log.rewind(c.driver.step)
    c.run_log.note(c.checkpointer.loaded)
    announce("rollback.after")
