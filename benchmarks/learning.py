"""python -m benchmarks.learning: does each algorithm learn the offline task, from the same start and seed?

Trains the bundled policy on two-digit sums with one `algorithm=` entry after the other and prints a Markdown table of
the held-out accuracy (greedy, 500 problems) along the way. Exit code 0 only when every one gains at least 30 points.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ALGORITHMS = ("ppo", "grpo", "dapo", "rloo", "gspo")
GAIN = 0.30


def train(folder: Path, name: str, steps: int, every: int, seed: int, more: list[str]) -> list[dict]:
    """The metric records of one run."""
    command = [
        *(sys.executable, "-m", "rlhf.train", f"algorithm={name}", f"trainer.default_local_dir={folder}"),
        *(f"trainer.experiment_name={name}", f"trainer.total_training_steps={steps}", f"trainer.test_freq={every}"),
        *(f"trainer.seed={seed}", "trainer.save_freq=0", *more),
    ]
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    return [json.loads(line) for line in (folder / "rlhf" / name / "metrics.jsonl").read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("overrides", nargs="*", help="settings for all runs, after --")
    arguments = parser.parse_args()
    marks = list(range(0, arguments.steps + 1, arguments.every))
    say = sys.stdout.write
    say(f"seed {arguments.seed}\n\n| algorithm | {' | '.join(f'step {m}' for m in marks)} | gain |\n")
    say("|---" * (len(marks) + 2) + "|\n")
    learned = True
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            records = train(Path(folder), name, arguments.steps, arguments.every, arguments.seed, arguments.overrides)
            curve = {record["step"]: record["val/accuracy"] for record in records if "val/accuracy" in record}
            gain = curve[arguments.steps] - curve[0]
            learned &= gain >= GAIN
            accuracies = " | ".join(f"{100 * curve[m]:.1f} %" for m in marks)
            say(f"| `{name}` | {accuracies} | {100 * gain:+.1f} |\n")
            sys.stdout.flush()
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
