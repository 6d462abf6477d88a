"""Writes the batch script of a run, or of a sweep as a job array."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.launch.scheduler_times import PEERS_S, stop_notice_s
from rlhf.launch.slurm.sbatch_options import cpus_of_rank
from rlhf.ranks.parent import LAUNCH
from rlhf.storage.layout import POINTER


@dataclass(frozen=True)
class Job:
    """A run of the script: its directory and the arguments of `python -m rlhf.train`."""

    run_dir: Path
    arguments: Sequence[str]


def batch_script(
    jobs: Sequence[Job],
    trainer: TrainerConfig,
    sbatch: Mapping[str, str | None],
    array: str | None = None,
    gpus_per_node: int | None = None,
) -> str:
    """Return the script.

    Args:
        jobs: one run, or with `array` the runs of a sweep, in the order of the array's task ids.
        trainer: sets machines, ranks, the time to save, and after how many attempts without progress the job ends.
        sbatch: the user's options for sbatch.
        gpus_per_node: None if `sbatch` asks for GPUs, or the run needs none.
    """
    jobs_text = _array_case(jobs) if array is not None else _assignments(jobs[0], "")
    one = trainer.nnodes == 1
    options = _options(trainer, sbatch, array, gpus_per_node)
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {shlex.quote(option)}" for option in options),
        jobs=jobs_text,
        launch=LAUNCH,
        pointer=POINTER,
        attempts=trainer.max_failures_per_step,
        command=_SUPERVISOR.format(python=shlex.quote(sys.executable)) if one else _ranks(trainer),
        final="|".join(map(str, (EXIT_DONE, *([EXIT_CRASHED] if one else []), EXIT_USER_ERROR))),
        requeue=EXIT_REQUEUE,
        crashed=EXIT_CRASHED,
    )


def _options(
    trainer: TrainerConfig, sbatch: Mapping[str, str | None], array: str | None, gpus_per_node: int | None
) -> list[str]:
    """Return all options of sbatch. The user's options replace the defaults, but not the options from `trainer`."""
    of_rank = cpus_of_rank(sbatch)
    one = trainer.nnodes == 1
    found: dict[str, str | None] = {
        "job-name": "rlhf",
        "output": "rlhf-%j.log" if array is None else "rlhf-%A_%a.log",
        "open-mode": "append",
        **({} if gpus_per_node is None else {"gpus-per-node": str(gpus_per_node)}),
        **sbatch,
        "nodes": str(trainer.nnodes),
        # The supervisor is one task with the CPUs of all its ranks. On several nodes, each rank is a task.
        "ntasks-per-node": "1" if one else str(trainer.ranks),
        "cpus-per-task": str(of_rank * trainer.ranks if one else of_rank),
        "signal": f"B:USR1@{stop_notice_s(trainer)}",
        "requeue": None,
        **({} if array is None else {"array": array}),
    }
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in found.items()]


def _array_case(jobs: Sequence[Job]) -> str:
    cases = "".join(f"  {number})\n{_assignments(job, '    ')}\n    ;;\n" for number, job in enumerate(jobs))
    return f"case $SLURM_ARRAY_TASK_ID in\n{cases}esac"


def _assignments(job: Job, indent: str) -> str:
    run_dir = shlex.quote(str(job.run_dir))
    return f"{indent}run_dir={run_dir}\n{indent}arguments=({' '.join(map(shlex.quote, job.arguments))})"


def _ranks(trainer: TrainerConfig) -> str:
    return _RANKS.format(python=shlex.quote(sys.executable), nproc=trainer.ranks, peers_s=PEERS_S)


_SUPERVISOR = """\
  srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {python} -m rlhf.train "${{arguments[@]}}" &"""

_RANKS = """\
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
  export MASTER_ADDR MASTER_PORT
  # After one rank has ended, srun waits {peers_s} s for the others to end as well, and then kills them.
  srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait={peers_s} bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={nproc}
    exec "$0" -m rlhf.train "$@"' {python} "${{arguments[@]}}" &"""

_SCRIPT = """\
#!/bin/bash
# Written by python -m rlhf.launch.slurm.
{options}

{jobs}
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
export {launch}=slurm-${{SLURM_CLUSTER_NAME:-}}-$job PYTHONHASHSEED=0 TOKENIZERS_PARALLELISM=false

# Before the time limit SLURM signals this script, which passes the signal on to the ranks and requeues the job.
stop=
trap 'stop=yes; kill -USR1 "$step" 2>/dev/null' USR1
trap 'stop=yes' TERM

newest() {{ cat "$run_dir/{pointer}" 2>/dev/null || echo none; }}
# The newest checkpoint, and the number of attempts in a row without a new checkpoint. The file outlives requeues.
progress=rlhf-$job.progress
read -r saved idle 2>/dev/null <"$progress" || {{ saved=$(newest); idle=0; }}

while true; do
{command}
  step=$!
  [ -z "$stop" ] || kill -USR1 "$step"
  wait "$step"
  code=$?
  while kill -0 "$step" 2>/dev/null; do  # a signal ended the wait
    wait "$step"
    code=$?
  done
  [ "$(newest)" = "$saved" ] && idle=$((idle + 1)) || idle=0
  saved=$(newest)
  case $code in {final}) break ;; esac
  if [ "$idle" -ge {attempts} ]; then
    echo "error: $idle attempts in a row ended without a new checkpoint (newest step: $saved), so the job is not started
again. Read the errors above. If there are none, the attempts were too short: set a longer --time, or a lower
trainer.save_freq. trainer.max_failures_per_step={attempts} sets the number of attempts." >&2
    code={crashed}
    break
  fi
  echo "$saved $idle" >"$progress"
  if [ "$code" -eq {requeue} ] || [ -n "$stop" ]; then
    # After scancel the job is no longer running, and must not come back.
    scontrol show job "$job" | grep -q JobState=RUNNING || break
    scontrol requeue "$job"
    exit {requeue}
  fi
  echo "The attempt ended with exit code $code. The next one continues from the newest checkpoint (step: $saved)." >&2
  sleep "$idle"
done
rm -f "$progress"
exit "$code"
"""
