"""python -m benchmarks.step: compares time, processor time and memory of a GRPO step with TRL's and a bare loop's.

A step samples, scores and trains on a batch of prompts once. The ways are `python -m rlhf.train` with its embedded
engine, `step_ways/trl_grpo.py` (TRL's GRPOTrainer, run by the Python of --trl in its own environment) and
`step_ways/bare.py` (torch and `generate`). All use the same small random Llama, float32, CPUs, no reference policy, no
gradient checkpointing and equal micro-batch tokens; prompts and samples are random. `equal`: no sample ends before the
limit; `skewed`: each token ends its sample with probability 4 %, so that a few are much longer than others. Runs
alternate in rotating order. Each run is measured from outside as a process tree. It writes a line after each step, and
the measurement lasts from the third line to the last but one. Figures are medians over runs with minimum and maximum;
ratios are medians within rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as of_transformers

from benchmarks.figures import ratios, rotated, spread
from rlhf.models.tiny import FOLDER

WAYS = Path(__file__).parent / "step_ways"
WARM = 3
"""Lines before the first measured line."""
LONGEST_PROMPT = 40
"""Tokens of the longest prompt of `write_prompts`, chat template included."""
LIMITS = {"equal": 64, "skewed": 256}
END_PROBABILITY = {"equal": 0.0, "skewed": 0.04}
LOOK_S, MEMORY_S, LONGEST_S = 0.01, 0.2, 900.0


@dataclass(frozen=True)
class Cost:
    """Means per step of one run, and the run's peak memory: the sum of the PSS of all its processes."""

    seconds: float
    processor_seconds: float
    peak_mib: float


def build_model(folder: Path, shape: str, hidden: int, layers: int) -> None:
    """Save a random Llama whose samples end with the probability of `shape`.

    One direction of its states is constant, and only the end token's row in the output layer depends on this direction.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        head = model.lm_head.weight
        head[:, 0] = 0.0
        state = model.model(torch.randint(20, 512, (8, 32))).last_hidden_state[..., 0].mean()
        others = torch.logsumexp(model(torch.randint(20, 512, (8, 32))).logits, dim=-1).mean()
        wanted = END_PROBABILITY[shape]
        logit = others + torch.logit(torch.tensor(wanted)) if wanted else torch.tensor(-50.0)
        head[tokenizer.eos_token_id] = 0.0
        head[tokenizer.eos_token_id, 0] = logit / state
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(path: Path) -> None:
    """Write sums of two to eight numbers, so that prompts have different lengths."""
    generator = torch.Generator().manual_seed(1)
    lines = []
    for i in range(512):
        numbers = torch.randint(10, 100, (2 + i % 7,), generator=generator).tolist()
        lines.append(json.dumps({"prompt": " + ".join(map(str, numbers)) + " =", "answer": str(sum(numbers))}))
    path.write_text("\n".join(lines) + "\n")


def command_of(way: str, spec: dict, trl: str | None) -> list[str]:
    """Return the command that runs `spec["steps"]` steps in this way."""
    if way == "this trainer":
        return [
            *(sys.executable, "-m", "rlhf.train", "recipes=minimal", f"model.path={spec['model']}"),
            *(f"data.train_files={spec['prompts']}", f"reward.functions=[{WAYS / 'rewards.py'}:score]"),
            *(f"data.train_batch_size={spec['prompts_per_step']}", f"data.max_response_length={spec['max_tokens']}"),
            *(f"rollout.n={spec['n']}", f"rollout.max_num_seqs={spec['prompts_per_step'] * spec['n']}"),
            *(f"actor.ppo_mini_batch_size={spec['prompts_per_step']}", f"actor.optim.lr={spec['lr']}"),
            "actor.use_kl_loss=false",
            f"actor.ppo_max_token_len_per_gpu={spec['micro_batch'] * (LONGEST_PROMPT + spec['max_tokens'])}",
            *(f"trainer.total_training_steps={spec['steps']}", "trainer.val_before_train=false"),
            *("trainer.save_freq=0", "trainer.test_freq=0", f"trainer.nproc={spec['ranks']}", "trainer.device=cpu"),
            *(f"trainer.threads_per_rank={spec['threads']}", f"trainer.default_local_dir={spec['folder']}"),
        ]
    script = WAYS / ("bare.py" if way == "bare loop" else "trl_grpo.py")
    python = sys.executable if way == "bare loop" else str(trl)
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec['ranks']}"]
    return [python, *(several if spec["ranks"] > 1 else []), str(script), str(Path(spec["folder"]) / "spec.json")]


def measure(way: str, spec: dict, trl: str | None) -> Cost:
    """Measure one run. Raises RuntimeError with its output if the run fails or takes too long."""
    folder = Path(spec["folder"])
    folder.mkdir()
    lines = folder / "rlhf/minimal/metrics.jsonl" if way == "this trainer" else Path(spec["lines"])
    (folder / "spec.json").write_text(json.dumps(spec))
    environment = os.environ | {"OMP_NUM_THREADS": str(spec["threads"]), "PYTHONHASHSEED": "0"}
    started, peak, looked = time.monotonic(), 0, 0.0
    marks: list[tuple[float, float]] = []
    with (folder / "output.log").open("wb") as log:
        run = subprocess.Popen(command_of(way, spec, trl), stdout=log, stderr=log, env=environment)
        tree = psutil.Process(run.pid)
        while run.poll() is None and time.monotonic() < started + LONGEST_S:
            time.sleep(LOOK_S)
            written = lines.read_bytes().count(b"\n") if lines.exists() else 0
            while len(marks) < written:
                marks.append((time.monotonic(), _processor_seconds(tree)))
            if len(marks) >= WARM and time.monotonic() > looked + MEMORY_S:
                peak, looked = max(peak, _memory(tree)), time.monotonic()
        run.kill()
    if run.wait() != 0 or len(marks) != spec["steps"]:
        raise RuntimeError(f"{way} ended with {run.returncode}:\n{(folder / 'output.log').read_text()[-4000:]}")
    (first, cpu_first), (last, cpu_last), count = marks[WARM - 1], marks[-2], len(marks) - 1 - WARM
    return Cost((last - first) / count, (cpu_last - cpu_first) / count, peak / 2**20)


def _processes(tree: psutil.Process) -> list[psutil.Process]:
    return [tree, *tree.children(recursive=True)]


def _processor_seconds(tree: psutil.Process) -> float:
    total = 0.0
    for process in _processes(tree):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def _memory(tree: psutil.Process) -> int:
    total = 0
    for process in _processes(tree):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--trl", help="the Python of an environment with TRL; without it TRL is left out")
    parser.add_argument("--shapes", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--hidden", type=int, default=96, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    arguments = parser.parse_args()
    ways = ["this trainer", "bare loop", *(["TRL"] if arguments.trl else [])]
    of_transformers.disable_progress_bar()
    sys.stdout.write("shape   ranks  way           s/step                   processor s/step         peak MiB\n")
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        write_prompts(base / "prompts.jsonl")
        for shape in arguments.shapes:
            build_model(base / shape, shape, arguments.hidden, arguments.layers)
            for ranks in arguments.ranks:
                compare(base, shape, ranks, ways, arguments)
    return 0


def compare(base: Path, shape: str, ranks: int, ways: list[str], arguments: argparse.Namespace) -> None:
    """Measure all ways in rotating order. Print each way's costs, and the others' ratios to this trainer."""
    costs: dict[str, list[Cost]] = {way: [] for way in ways}
    for repeat in range(arguments.repeats):
        for way in rotated(ways, repeat):
            folder = base / f"{shape}_{ranks}_{repeat}_{ways.index(way)}"
            spec = {
                "model": str(base / shape),
                "prompts": str(base / "prompts.jsonl"),
                "folder": str(folder),
                "lines": str(folder / "lines"),
                "ranks": ranks,
                "threads": arguments.threads,
                "steps": arguments.steps,
                "prompts_per_step": arguments.prompts,
                "n": arguments.n,
                "max_tokens": LIMITS[shape],
                "micro_batch": arguments.micro_batch,
                "lr": 1e-9,
            }
            costs[way].append(measure(way, spec, arguments.trl))
    for way in ways:
        time_s, cpu_s = spread([c.seconds for c in costs[way]]), spread([c.processor_seconds for c in costs[way]])
        memory = spread([c.peak_mib for c in costs[way]], ".0f")
        sys.stdout.write(f"{shape:7} {ranks:5}  {way:13} {time_s:24} {cpu_s:24} {memory}\n")
    for way in ways[1:]:
        times = ratios([c.seconds for c in costs[way]], [c.seconds for c in costs["this trainer"]])
        cpu = ratios([c.processor_seconds for c in costs[way]], [c.processor_seconds for c in costs["this trainer"]])
        sys.stdout.write(
            f"{shape:7} {ranks:5}  {way} / this trainer: time {spread(times, '.2f')}, "
            f"processor time {spread(cpu, '.2f')}\n"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
