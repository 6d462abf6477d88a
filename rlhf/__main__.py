"""python -m rlhf: lists the commands."""

import sys

COMMANDS = {
    "rlhf.train": "train; the same command resumes",
    "rlhf.plan": "memory, disk space and tokens that a run needs",
    "rlhf.doctor": "check the machines, with a remedy for each problem",
    "rlhf.evaluate": "evaluate a model, a run or a checkpoint",
    "rlhf.status": "what runs do now",
    "rlhf.report": "one HTML page about runs",
    "rlhf.samples": "the policy's responses",
    "rlhf.compare": "results of runs side by side",
    "rlhf.checkpoint": "list, verify, prune, export, merge and convert checkpoints",
    "rlhf.translate": "a configuration of verl, TRL or OpenRLHF as a recipe",
    "rlhf.launch.kubernetes": "print the Kubernetes manifest of a run",
    "rlhf.launch.slurm": "submit a run to SLURM",
}


def main() -> int:
    """Print the commands. Return 0, or 2 (the exit code of a mistake) for any argument but --help."""
    width = max(map(len, COMMANDS))
    lines = [f"python -m {name:{width}}  {what}" for name, what in COMMANDS.items()]
    sys.stdout.write("\n".join([*lines, "", "--help after a command shows its arguments.", ""]))
    return 2 if sys.argv[1:] not in ([], ["--help"], ["-h"]) else 0


if __name__ == "__main__":
    sys.exit(main())
