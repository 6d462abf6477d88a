"""Section `trainer`: run directory, ranks, length, cadence, restarts."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting


@dataclass
class TrainerConfig:
    project_name: str = setting("rlhf", resume="harmless")
    """First folder of the run directory, wandb's project and MLflow's experiment."""
    experiment_name: str = setting("default", resume="harmless")
    """Second folder of the run directory, and the run's name on wandb and MLflow."""
    default_local_dir: str = setting("checkpoints", resume="harmless")
    """Parent of run directories: `<default_local_dir>/<project_name>/<experiment_name>`."""
    nproc: int | None = setting(1, ge=1, resume="harmless", by_device=True)
    """Ranks on each machine; null means one per GPU that `rollout=vllm_server` does not use, or 1 on a CPU.
    Any value resumes the exact state; later steps are bit-identical only with the same `nproc`."""
    nnodes: int = setting(1, ge=1, resume="harmless")
    """Machines, each with `nproc` ranks, that `launcher=ray`, `python -m rlhf.launch.slurm` or `rlhf.launch.kubernetes`
    starts. `launcher=local` allows only 1. Under torchrun, leave 1: torchrun sets the number of machines."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), resume="harmless")
    """`auto` means CUDA if a device is visible."""
    threads_per_rank: int | None = setting(None, ge=1, resume="harmless")
    """CPU threads per rank; null means OMP_NUM_THREADS if set, else cores / nproc. On a dedicated machine,
    OMP_WAIT_POLICY=active in the environment is faster."""
    check_memory: bool = setting(True, resume="harmless")
    """Do not start a run on a GPU if `python -m rlhf.plan` estimates more memory than the GPU has."""
    seed: int = setting(1, ge=0, le=2**32 - 1)
    """Seed of all random choices of the run."""
    deterministic: bool | None = setting(None)
    """Use only deterministic kernels; null means true on a CPU, false on CUDA."""
    tf32: bool | None = setting(False, by_device=True)
    """On CUDA: compute float32 matrix products in TF32 (10 mantissa bits instead of 23); null means true."""
    total_epochs: int = setting(1, ge=1)
    """Passes over the training prompts, including prompts that dynamic sampling drops. Changing the length changes a
    decaying LR schedule."""
    total_training_steps: int | None = setting(None, ge=1)
    """Total steps; overrides `total_epochs`."""
    critic_warmup: int = setting(0, ge=0)
    """Initial steps that train only the critic."""
    save_freq: int = setting(20, ge=0, resume="harmless")
    """Steps between checkpoints; the last step is also saved. 0 saves only when the run is asked to stop."""
    test_freq: int = setting(20, ge=0, resume="harmless")
    """Steps between evaluations on held-out prompts; the last step is also evaluated. 0 evaluates at most once, before
    training (`val_before_train`)."""
    val_before_train: bool = setting(True, resume="harmless")
    """Evaluate the initial policy as step 0."""
    log_rollouts: int = setting(8, ge=-1, resume="harmless")
    """Training samples per step in `samples/step_N.jsonl` of the run directory; -1 means all. All evaluation samples
    are written."""
    log_val_generations: int = setting(10, ge=0, resume="harmless")
    """Samples per evaluation in a table of the trackers."""
    log_samples: bool = setting(False, resume="harmless")
    """Log the best and the worst sample of each step's rollouts and of each evaluation."""
    resume_mode: str = setting("auto", choices=("auto", "disable", "resume_path"), resume="start")
    """`auto` resumes from the newest intact checkpoint in the run directory; `disable` allows no checkpoints there;
    `resume_path` starts from `resume_from_path`."""
    resume_from_path: str | None = setting(None, resume="start")
    """`global_step_N` directory for `resume_mode=resume_path`."""
    allow_config_change: bool = setting(False, resume="harmless")
    """Resume even if settings that change the trajectory differ from the checkpoint's."""
    overwrite: bool = setting(False, resume="start")
    """Delete the content of the run directory and start a new run, each time the command is given. Restarts by the
    supervisor, torchrun or Ray delete nothing."""
    logger: list[str] = setting([], resume="harmless")
    """Trackers besides the console and metrics.jsonl: `wandb`, `tensorboard`, `mlflow`."""
    callbacks: list[str] = setting([], resume="harmless")
    """Your functions `path/to/file.py:name`, called as `name(step, metrics)` after each step. If one raises, the run
    saves and ends."""
    callback_kwargs: dict[str, Any] = setting({}, resume="harmless")
    """Extra arguments for `callbacks`; each function gets those it accepts."""
    max_restarts: int = setting(10, ge=0, resume="harmless")
    """Restarts after crashes before the run ends. A crash at a later step than all earlier crashes resets the count."""
    warm_start: bool = setting(True, resume="harmless")
    """Fork ranks from a process with all imports done, for faster restarts. Where a fork is unsafe (with `rollout=vllm`
    or outside Linux), ranks start as new processes, as with false."""
    restart_backoff_s: float = setting(0.1, ge=0, resume="harmless")
    """Seconds before the first restart; ten times longer for each further restart."""
    restart_backoff_max_s: float = setting(60.0, ge=0, resume="harmless")
    """Largest backoff in seconds."""
    max_failures_per_step: int = setting(3, ge=1, resume="harmless")
    """Number of crashes in a row at the same step after which the run ends with a report."""
    preempt_grace_s: float = setting(300.0, gt=0, resume="harmless")
    """Seconds after SIGTERM or SIGUSR1 for the ranks to finish their step and save, before they are killed."""
    collective_timeout_s: float = setting(600.0, gt=0, resume="harmless")
    """Seconds to wait for another rank during training; after that the attempt fails and restarts. For saves, see
    `checkpoint.timeout_s`."""
    watchdog: bool = setting(True, resume="harmless")
    """If the ranks make no progress, log their stacks and end the attempt; the launcher restarts them."""
    watchdog_timeout_s: float | None = setting(None, gt=0, resume="harmless")
    """Time limit in seconds of each phase of the loop; null means 5 times the phase's longest time so far, at least
    300."""
    watchdog_first_timeout_s: float = setting(3600.0, gt=0, resume="harmless")
    """Longest time in seconds for start-up (imports, downloads, loading). With `watchdog_timeout_s=null`, also for
    phases seen fewer than 3 times."""

    @property
    def ranks(self) -> int:
        """Return `nproc`; composition has replaced null by the device's default."""
        assert self.nproc is not None
        return self.nproc
