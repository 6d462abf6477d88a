"""Section `trainer`: run directory, ranks, length, cadence, restarts."""

from dataclasses import dataclass

from rlhf.config.schema.fields import setting


@dataclass
class TrainerConfig:
    project_name: str = setting("rlhf", resume="harmless")
    """First folder of the run directory, and wandb's project."""
    experiment_name: str = setting("default", resume="harmless")
    """Second folder of the run directory, and wandb's run name."""
    default_local_dir: str = setting("checkpoints", resume="harmless")
    """Folder of the run directories: `<default_local_dir>/<project_name>/<experiment_name>`."""
    nproc: int | None = setting(1, ge=1, resume="harmless", by_device=True)
    """Ranks on this machine; null means all its GPUs (but those of `rollout=vllm_server`), 1 without. State is exact
    after a change; bits of the following steps are equal at equal `nproc` only."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), resume="harmless")
    """`auto` takes CUDA when a device is visible."""
    threads_per_rank: int | None = setting(None, ge=1, resume="harmless")
    """CPU threads of each rank; null means OMP_NUM_THREADS if that is set, else cores / nproc. They sleep at barriers,
    which other processes on the same cores need; on a machine of its own, OMP_WAIT_POLICY=active in the environment is
    faster."""
    check_memory: bool = setting(True, resume="harmless")
    """Refuse to start on a GPU what needs more memory than it has, by `python -m rlhf.plan`."""
    seed: int = setting(1, ge=0, le=2**32 - 1)
    """Every random choice of the run follows from it."""
    deterministic: bool | None = setting(None)
    """Deterministic kernels only; null means true on CPU, false on CUDA."""
    tf32: bool | None = setting(False, by_device=True)
    """On CUDA: matrix products of float32, where it stays, in TF32, with 10 bits of its 23 of mantissa; null means true
    there."""
    total_epochs: int = setting(1, ge=1)
    """Passes over the training prompts, those that dynamic sampling drops included, unless `total_training_steps` is
    set. A longer run changes a decaying LR schedule."""
    total_training_steps: int | None = setting(None, ge=1)
    """Steps in all; overrides `total_epochs`."""
    critic_warmup: int = setting(0, ge=0)
    """Steps at the start in which only the critic is trained."""
    save_freq: int = setting(20, ge=0, resume="harmless")
    """Steps between checkpoints; the last step is saved too. 0 saves only when the run is asked to stop."""
    test_freq: int = setting(20, ge=0, resume="harmless")
    """Steps between evaluations on the held-out prompts; the last step is evaluated too. 0 never evaluates."""
    val_before_train: bool = setting(True, resume="harmless")
    """Evaluate the starting policy as step 0."""
    log_rollouts: int = setting(8, ge=-1, resume="harmless")
    """Rollouts of each step in `samples/step_N.jsonl` of the run directory, beside all samples of an evaluation; -1 for
    all of the step's."""
    log_val_generations: int = setting(10, ge=0, resume="harmless")
    """Samples of each evaluation that wandb and TensorBoard show as a table."""
    log_samples: bool = setting(False, resume="harmless")
    """Show two samples of each step, and of each evaluation, in the terminal."""
    resume_mode: str = setting("auto", choices=("auto", "disable", "resume_path"), resume="start")
    """`auto` continues from the newest intact checkpoint of the run directory; `disable` refuses to; `resume_path`
    starts from one."""
    resume_from_path: str | None = setting(None, resume="start")
    """The `global_step_N` directory for `resume_mode=resume_path`."""
    allow_config_change: bool = setting(False, resume="harmless")
    """Resume although settings that change the trajectory differ from the checkpoint's."""
    overwrite: bool = setting(False, resume="start")
    """Delete what the run directory holds before a new run, each time the command is given, and not when its launcher
    restarts the ranks (moved to trash first)."""
    logger: list[str] = setting([], resume="harmless")
    """Trackers beside the console and metrics.jsonl, which are always on: `wandb`, `tensorboard`."""
    max_restarts: int = setting(10, ge=0, resume="harmless")
    """Restarts after crashes before the run is given up; the count starts again once a restart has got past the step it
    died at."""
    warm_start: bool = setting(True, resume="harmless")
    """Fork the ranks from a process that has done their imports, so that a restart does not do them again; false, or
    where that is not safe, starts each rank anew."""
    restart_backoff_s: float = setting(0.1, ge=0, resume="harmless")
    """Seconds before the first restart; ten times as many for each further one."""
    restart_backoff_max_s: float = setting(60.0, ge=0, resume="harmless")
    """Longest wait before a restart, in seconds."""
    max_failures_per_step: int = setting(3, ge=1, resume="harmless")
    """Crashes in a row at one step after which the run ends with the evidence."""
    preempt_grace_s: float = setting(300.0, gt=0, resume="harmless")
    """Seconds from SIGTERM or SIGUSR1 within which the ranks finish their step and save, before they are killed."""
    collective_timeout_s: float = setting(600.0, gt=0, resume="harmless")
    """Longest wait for another rank in training, in seconds; then the attempt fails and restarts. Saves:
    `checkpoint.timeout_s`."""
    watchdog: bool = setting(True, resume="harmless")
    """End an attempt whose ranks make no progress, with their stacks as evidence; the supervisor, or torchrun, restarts
    it."""
    watchdog_timeout_s: float | None = setting(None, gt=0, resume="harmless")
    """Longest a rank may stay in one phase of the loop, in seconds; null learns: 5 times as long as any rank ever has,
    at least 300."""
    watchdog_first_timeout_s: float = setting(3600.0, gt=0, resume="harmless")
    """The same for start-up (imports, downloads, loading) and, while it is learned, for a phase that was seen fewer
    than 3 times."""

    @property
    def ranks(self) -> int:
        """`nproc` of a composed configuration, in which it is a number."""
        assert self.nproc is not None
        return self.nproc
