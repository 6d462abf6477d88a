"""python -m benchmarks.learning: checks that each algorithm learns off-policy, with several optimizer steps per batch.

Trains every entry of `algorithm=`, and the default algorithm with each setting of `VARIANTS`, from the same policy: the
bundled policy with noise on its weights, which keeps a fifth of its accuracy. The algorithms differ in how fast the
policy learns to add again. Several steps per batch make ratios, clips and the critic matter. Prints a Markdown table of
the greedy held-out accuracy over time: mean over seeds, and standard deviation if there are several. Each row is a
separate set of runs; `--rows` selects rows.

Exits with 0 only if every run gains at least 20 points, clips some tokens, and with a critic explains some of the
returns' variance.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.config.algorithm_table import ALGORITHMS, ESTIMATORS
from rlhf.models import tiny

NOISE, NOISE_SEED = 0.3, 7
"""Standard deviation of the noise, relative to each matrix's standard deviation, and the seed of the noise."""
GAIN = 0.20
SETTINGS = (
    "actor.ppo_mini_batch_size=16",
    "actor.ppo_epochs=2",
    "data.reasoning_gym.val_size=300",
    "trainer.save_freq=0",
    "trainer.device=cpu",
)
CRITIC = (
    # Do not start the critic from the weakened policy: it would have to learn to add before it can estimate values.
    f"critic.path={tiny.FOLDER}",
    "critic.ppo_epochs=2",
)

WEIGHED = "algorithm.rollout_correction.rollout_is=token"
VARIANTS: dict[str, tuple[str, ...]] = {
    # Adapters with 5 % of the policy's weights, at ten times the recipe's learning rate.
    "lora": (
        *("model.lora.enabled=true", "model.lora.rank=4", "actor.optim.lr=2e-3"),
        "checkpoint.contents=[model,optimizer,extra]",
    ),
    "shuffle": ("actor.shuffle=true",),
    "mask_truncated_responses": ("algorithm.mask_truncated_responses=true",),
    "min_p": ("rollout.min_p=0.05", WEIGHED),
    "repetition_penalty": ("rollout.repetition_penalty=1.05", WEIGHED),
    "rollout_is": (WEIGHED,),
    "rollout_rs": (
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=5",
        "algorithm.rollout_correction.rollout_rs_threshold_lower=0.5",
    ),
    "use_bias_correction_kl": ("actor.use_bias_correction_kl=true",),
    "entropy_ctrl": ("actor.entropy_ctrl.type=adaptive",),
    "decay_norm_and_bias": ("actor.optim.decay_norm_and_bias=true",),
    "lr_scheduler_interval": ("actor.optim.lr_scheduler_interval=training_step", "actor.optim.lr_warmup_steps=4"),
    **{f"async_steps_{k}": (f"rollout.async_steps={k}", WEIGHED) for k in (1, 2, 4)},
    "normalize_reward": ("algorithm=rloo", "algorithm.normalize_reward=running"),  # GRPO always divides by a deviation
}
"""Further rows: the default algorithm, or a named algorithm, with other settings."""
ROWS = (*ALGORITHMS, *VARIANTS)


@dataclass(frozen=True)
class Run:
    """Result of one run."""

    accuracy: dict[int, float]
    """Held-out accuracy by step; step 0 is the policy before training."""
    clipped: float
    """Mean fraction of tokens whose loss the clip changed. KL-Cov: the fraction with a penalty. SAPO: the reduction by
    its gate."""
    explained: float | None
    """Explained variance of the returns, None without a critic: the mean over the best consecutive quarter of steps.
    The value falls again when all prompts are solved. A critic with constant values explains at most 0."""

    @classmethod
    def of(cls, records: Sequence[dict]) -> "Run":
        """Return the result from the metric records of the steps."""
        steps = [record for record in records if "actor/pg_loss" in record]
        variances = [r["critic/explained_variance"] for r in steps if "critic/explained_variance" in r]
        width = max(1, len(variances) // 4)
        windows = [variances[start : start + width] for start in range(len(variances) - width + 1)]
        return cls(
            {record["step"]: record["val/accuracy"] for record in records if "val/accuracy" in record},
            statistics.fmean(map(_clipped, steps)),
            max(map(statistics.fmean, windows)) if variances else None,
        )

    @property
    def gain(self) -> float:
        """Accuracy at the end minus accuracy at the start."""
        return self.accuracy[max(self.accuracy)] - self.accuracy[0]

    def problems(self) -> Iterator[str]:
        """Yield the reasons why the run fails the benchmark."""
        if self.gain < GAIN:
            yield f"gained {100 * self.gain:+.1f} points, fewer than {100 * GAIN:.0f}"
        if not self.clipped > 0:
            yield "clipped nothing"
        if self.explained is not None and not self.explained > 0:
            yield f"the critic explains {self.explained:.2f} of the returns' variance"


def _clipped(record: dict) -> float:
    for name in ("actor/pg_clipfrac", "actor/kl_cov_frac"):
        if name in record:
            return record[name]
    return 1 - record["actor/sapo_weight"]


def weakened_policy(folder: Path) -> Path:
    """Save the bundled policy with noise on its matrices in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(tiny.FOLDER, dtype=torch.float32)
    generator = torch.Generator().manual_seed(NOISE_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(NOISE * parameter.std() * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.FOLDER).save_pretrained(folder)
    return folder


def settings_of(row: str) -> tuple[str, ...]:
    """Return the settings of a row that the command's options do not set."""
    if row in VARIANTS:
        return (*SETTINGS, *VARIANTS[row])
    critic = CRITIC if ESTIMATORS[ALGORITHMS[row].adv_estimator].critic else ()
    return (f"algorithm={row}", *SETTINGS, *critic)


def train(folder: Path, policy: Path, name: str, seed: int, arguments: argparse.Namespace) -> Run:
    """Run one training to its end. Raises RuntimeError with the end of its output if the run fails."""
    label = f"{name}_{seed}"
    command = [
        *(sys.executable, "-m", "rlhf.train", f"trainer.seed={seed}", f"model.path={policy}"),
        *(f"trainer.default_local_dir={folder}", f"trainer.experiment_name={label}", *settings_of(name)),
        *(f"trainer.total_training_steps={arguments.steps}", f"trainer.test_freq={arguments.every}"),
        *arguments.overrides,
    ]
    with (folder / f"{label}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code:
        tail = "\n".join((folder / f"{label}.log").read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{label} has ended with exit code {code}:\n{tail}")
    lines = (folder / "rlhf" / label / "metrics.jsonl").read_text().splitlines()
    return Run.of([json.loads(line) for line in lines])


def mean_and_deviation(values: Sequence[float], form: str = ".1f") -> str:
    """Format the mean, and the standard deviation of several values."""
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form}}"


def row(name: str, runs: Sequence[Run]) -> str:
    curve = [mean_and_deviation([100 * run.accuracy[step] for run in runs]) for step in sorted(runs[0].accuracy)]
    gain = mean_and_deviation([100 * run.gain for run in runs])
    clipped = mean_and_deviation([100 * run.clipped for run in runs], ".2f")
    explained = [run.explained for run in runs if run.explained is not None]
    cells = [f"`{name}`", *curve, gain, clipped, mean_and_deviation(explained, ".2f") if explained else ""]
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=8, help="steps between evaluations")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side, one core each")
    parser.add_argument("overrides", nargs="*", help="settings for all runs, after --")
    arguments = parser.parse_args()
    marks = [*range(0, arguments.steps, arguments.every), arguments.steps]
    write = sys.stdout.write
    write(f"seeds {', '.join(map(str, arguments.seeds))}; accuracies and clipped tokens in %\n\n")
    write(f"| row | {' | '.join(f'step {m}' for m in marks)} | gain | clipped | explained variance |\n")
    write("|---" * (len(marks) + 4) + "|\n")
    problems = []
    with tempfile.TemporaryDirectory() as path, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(path)
        policy = weakened_policy(folder / "policy")
        started = {
            name: [pool.submit(train, folder, policy, name, seed, arguments) for seed in arguments.seeds]
            for name in arguments.rows
        }
        for name, futures in started.items():
            runs = [future.result() for future in futures]
            write(row(name, runs))
            sys.stdout.flush()
            for seed, run in zip(arguments.seeds, runs, strict=True):
                problems += [f"{name}, seed {seed}: {problem}" for problem in run.problems()]
    write("".join(f"\n{problem}" for problem in problems) + "\n" * bool(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
