"""One rank: builds every component from the resolved configuration, runs the loop, and says in its exit code how it ended."""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from rlhf.launch.parent import SUPERVISOR_PID, die_with_parent

if __name__ == "__main__":
    # Before the slow imports: a supervisor that dies meanwhile must take this rank with it.
    die_with_parent()

import torch
import torch.distributed as dist

from rlhf import distributed
from rlhf.backends.fsdp2 import Fsdp2Backend, Fsdp2Policy
from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.driver_state import DriverState
from rlhf.checkpoint.errors import is_unfixable
from rlhf.checkpoint.layout import RESOLVED
from rlhf.checkpoint.rng import seed_everything
from rlhf.checkpoint.run_dir import finished_step, planned_steps, prepare, read_run_file
from rlhf.config import Config
from rlhf.config.files import from_yaml, to_yaml
from rlhf.data import PromptStream, build_train_set, build_val_set
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, Preempted, UserError
from rlhf.evaluation import Evaluator
from rlhf.events import subscribe, subscribe_from_environment
from rlhf.launch.lock import hold_rank_lock, run_lock
from rlhf.launch.logs import configure_logging
from rlhf.launch.preemption import PreemptionFlag
from rlhf.launch.status import StatusWriter
from rlhf.loop import Parts, train
from rlhf.models import loading
from rlhf.policy_sampler import PolicySampler
from rlhf.prompt_share import PromptShare
from rlhf.reward import build_reward
from rlhf.rollout import SamplingParams, build_embedded_engine, check_lengths
from rlhf.tracking import Progress, Tracker, write_report
from rlhf.tracking.run_log import RunLog

log = logging.getLogger(__name__)
AFTER_THE_STEP = ("evaluation.", "metrics.", "commit.")
"""Events once the driver has counted the step done."""


def build(config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter) -> Parts:
    """Every component of this rank, brought to the newest checkpoint. Collective; data and settings are checked before weights load."""
    seed_everything(config.trainer.seed, coordinator.rank)
    preemption = PreemptionFlag()
    folder = coordinator.on_leader(lambda: loading.resolve_path(config.model))
    if not folder.is_dir():  # the leader downloaded it onto a disk of its own
        folder = loading.resolve_path(config.model)
    tokenizer = loading.load_tokenizer(config.model, folder)
    hf_config = loading.load_model_config(config.model, folder)
    check_lengths(hf_config, config.data.max_prompt_length, config.data.max_response_length)
    train_set, val_set = build_train_set(config, tokenizer), build_val_set(config, tokenizer)
    if len(set(coordinator.gather(train_set.fingerprint))) > 1:
        raise UserError(
            f"The ranks read different training prompts from {config.data.train_files or config.data.reasoning_gym}: give every node the "
            "same files, and set PYTHONHASHSEED=0 for all ranks (some reasoning-gym tasks depend on it; our own supervisor sets it)."
        )
    reward = build_reward(config.reward)

    stream = PromptStream(train_set, config.trainer.seed, config.data.shuffle)
    batch_size, actor = config.data.train_batch_size, config.actor
    prompts = PromptShare(stream, batch_size, actor.ppo_mini_batch_size, coordinator.rank, coordinator.world_size)
    steps_per_epoch = len(train_set) / batch_size
    total_steps = planned_steps(config, steps_per_epoch)

    policy = loading.load_model(config.model, folder, hf_config, torch.float32)
    engine = build_embedded_engine(policy, tokenizer, config.rollout, device)
    reference = None
    if actor.use_kl_loss:
        frozen = loading.load_model(config.model, folder, hf_config, torch.float32).requires_grad_(False).eval()
        reference = Fsdp2Policy(frozen, config.backend, device, config.rollout.temperature)
    if config.model.enable_gradient_checkpointing:
        # Renamed in transformers 5.2x, where the old name warns.
        enable = getattr(policy, "activation_checkpointing_enable", policy.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    hf_files = loading.hf_files(hf_config, tokenizer, policy.generation_config)
    backend = Fsdp2Backend(
        policy,
        config.backend,
        actor.optim,
        device,
        config.rollout.temperature,
        grad_clip=actor.grad_clip,
        total_optimizer_steps=total_steps * actor.ppo_epochs * prompts.mini_batches,
        hf_files=hf_files,
    )

    run_id = read_run_file(config.run_dir)["run_id"]
    driver = DriverState(run_id, total_steps, steps_per_epoch)
    subscribe(lambda event: status.event(driver.step + (not event.startswith(AFTER_THE_STEP)), event))
    fingerprint = coordinator.on_leader(lambda: loading.fingerprint(folder))
    checkpointer = Checkpointer(
        config,
        coordinator,
        {"actor": backend},
        lambda: driver.state_dict() | {"data": prompts.state_dict()},
        fingerprint,
    )
    saved = checkpointer.resume()
    if saved is not None:
        stream.load_state_dict(saved["data"], allow_change=config.trainer.allow_config_change)
        driver.load_state_dict(saved)

    rollout, greedy = config.rollout, config.rollout.val_kwargs
    longest, stop = config.data.max_response_length, tuple(rollout.stop)
    params = SamplingParams(
        rollout.n, rollout.temperature, rollout.top_p, rollout.top_k, longest, stop, rollout.ignore_eos
    )
    val_params = SamplingParams(greedy.n, greedy.temperature, greedy.top_p, greedy.top_k, longest, stop)
    sampler = PolicySampler(engine, backend, config.trainer.seed)
    leads = coordinator.is_leader
    run_log = RunLog(
        Tracker(config, config.run_dir, driver.run_id) if leads else None,
        Progress(config, total_steps) if leads else Progress.silent(),
    )
    run_log.start(driver.step, resumed=saved is not None)
    return Parts(
        config=config,
        device=device,
        tokenizer=tokenizer,
        coordinator=coordinator,
        prompts=prompts,
        sampler=sampler,
        params=params,
        reward=reward,
        actor=backend,
        reference=reference,
        evaluator=Evaluator(val_set, sampler, val_params, reward, tokenizer, coordinator, config.trainer),
        checkpointer=checkpointer,
        run_log=run_log,
        driver=driver,
        stop_requested=lambda: distributed.any_rank(preemption.requested, device),
    )


def run(config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter) -> None:
    """Build and train; trackers and reward processes are closed however it ends."""
    parts = build(config, device, coordinator, status)
    try:
        train(parts)
    finally:
        parts.run_log.close()
        parts.reward.close()


def main(run_dir: Path) -> int:
    """A rank under our supervisor, which holds the run lock and has written the resolved configuration."""
    config = from_yaml((run_dir / RESOLVED).read_text())

    def work(status: StatusWriter) -> None:
        hold_rank_lock(run_dir)
        device = distributed.start(config.trainer)
        run(config, device, _coordinator(config), status)

    return _guarded(run_dir, work)


def main_under_torchrun(config: Config) -> int:
    """A rank that torchrun started: the leader does what our supervisor would have done before and after."""

    def work(status: StatusWriter) -> None:
        device = distributed.start(config.trainer)
        coordinator = _coordinator(config)
        # Every rank composed by itself; the leader's result is the one that counts.
        agreed = from_yaml(coordinator.broadcast(to_yaml(config)))
        with ExitStack() as locks:
            coordinator.on_leader(lambda: locks.enter_context(run_lock(agreed.run_dir)))
            coordinator.on_leader(lambda: prepare(agreed))
            finished = coordinator.on_leader(lambda: finished_step(agreed))
            if finished is None:
                run(agreed, device, coordinator, status)
            elif coordinator.is_leader:
                log.info("The run in %s is finished at step %d.", agreed.run_dir, finished)
            if coordinator.is_leader:
                log.info("Done.\n%s", write_report(agreed.run_dir))

    return _guarded(config.run_dir, work)


def _coordinator(config: Config) -> Coordinator:
    return Coordinator(timedelta(seconds=config.checkpoint.timeout_s))


def _guarded(run_dir: Path, work: Callable[[StatusWriter], None]) -> int:
    """Run `work` and turn its end into an exit code; an error is left in the status file as evidence."""
    rank = int(os.environ["RANK"])
    configure_logging(rank)
    try:
        status = StatusWriter(run_dir, rank)
    except OSError as error:
        log.error(
            "Cannot write into %s (%s). Set trainer.default_local_dir to a writable folder.", run_dir, error.strerror
        )
        return EXIT_USER_ERROR
    subscribe_from_environment()
    try:
        work(status)
        dist.destroy_process_group()
        return EXIT_DONE
    except Preempted as request:
        log.info("%s", request)
        return EXIT_REQUEUE
    except UserError as error:
        return _failed(status, str(error))
    except Exception as error:
        if is_unfixable(error):
            return _failed(status, f"{error}. Mend it and run the same command again.")
        status.error("crash", f"{type(error).__name__}: {error}", traceback.format_exc())
        if (
            SUPERVISOR_PID not in os.environ
        ):  # the supervisor shows the first rank's, and not the peers' that follow from it
            log.exception("Rank %d crashed.", rank)
        return EXIT_CRASHED


def _failed(status: StatusWriter, message: str) -> int:
    status.error("user", message)
    if SUPERVISOR_PID not in os.environ:  # the supervisor shows it itself, once
        log.error("%s", message)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    logging.shutdown()
    # Not sys.exit: after an error the process group's threads may wait for peers that are gone.
    os._exit(code)
