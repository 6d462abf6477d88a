"""Training runs: speed, memory compared with the plan, fragmentation, and vLLM in the rank."""

import operator
import subprocess
import sys
from itertools import dropwhile
from pathlib import Path
from statistics import fmean

from benchmarks.gpu_parts.listener import events, listening
from benchmarks.gpu_parts.place import QWEN_1_5B, QWEN_7B, QWEN_HALF_B, Figures, Place, need, watched

GIB = 1 << 30


def suite(place: Place) -> Figures:
    """Run tests/gpu."""
    need("pytest")
    tests = Path(__file__).parents[2] / "tests" / "gpu"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=tests.parents[1],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        place.problems.append(f"tests/gpu: {done.stdout[-2000:]}")
    return {"last line": done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]}


def step(place: Place) -> Figures:
    """Train a random 0.5B policy for three steps with GSM8K's lengths: MFU, and the share of time with a kernel."""
    model = place.model("half-b", QWEN_HALF_B)
    with watched(place.device) as gpu:
        records = place.train(place.overrides(model, "step"))
    last = records[-1]
    figures = {
        name: value for name, value in last.items() if name.startswith(("timing_s/", "perf/mfu", "perf/max_mem"))
    }
    # Leave out the samples before the first kernel: while a run starts, the GPU has nothing to do.
    busy = list(dropwhile(operator.not_, gpu["busy"])) or [0.0]
    figures["mean utilization of nvidia-smi, %"] = fmean(busy)
    place.goal(fmean(busy) >= 80, f"kernels ran {fmean(busy):.0f} % of the time, less than 80 %")
    return figures


def lora(place: Place) -> Figures:
    """Train adapters of a random 7B policy with 16k tokens per pass: peak memory compared with the plan, and MFU."""
    from rlhf.compose import compose_config
    from rlhf.config.library import Library
    from rlhf.planning.check import plan_of
    from rlhf.planning.memory_plan import CUDA_BASE

    overrides = place.overrides(
        place.model("seven-b", QWEN_7B),
        "lora",
        *("model.lora.enabled=true", "model.enable_gradient_checkpointing=true", "trainer.total_training_steps=2"),
        *("data.train_batch_size=8", "rollout.n=4", "actor.ppo_mini_batch_size=8", "rollout.max_num_seqs=32"),
        *(() if place.rehearsal else ("actor.ppo_max_token_len_per_gpu=16384", "data.max_response_length=512")),
    )
    found = plan_of(compose_config(overrides, Library.find(None)))
    last = place.train(overrides)[-1]
    figures: Figures = {"perf/mfu/actor": last.get("perf/mfu/actor")}
    if found is not None and not place.rehearsal:
        planned, peak = found[1].peak.total - CUDA_BASE, last["perf/max_memory_allocated_gb"] * GIB
        figures |= {"planned GiB": planned / GIB, "peak GiB": peak / GIB}
        place.goal(abs(planned / peak - 1) <= 0.1, f"the plan is {planned / peak - 1:+.0%} off the peak")
    return figures


def fragmentation(place: Place) -> Figures:
    """Train on ragged micro-batches: measure the memory that torch reserves, and its ratio to the allocated memory."""
    more = ("rollout.ignore_eos=false", "trainer.total_training_steps=2", "actor.ppo_max_token_len_per_gpu=4096")
    last = place.train(place.overrides(place.model("half-b", QWEN_HALF_B), "ragged", *more))[-1]
    figures = {name: value for name, value in last.items() if name.startswith("perf/max_memory")}
    if figures:
        figures["reserved / allocated"] = (
            figures["perf/max_memory_reserved_gb"] / figures["perf/max_memory_allocated_gb"]
        )
    return figures


def vllm(place: Place) -> Figures:
    """Train five steps with vLLM in the rank: compare log-probs, and measure weight sync and memory in sleep."""
    from rlhf.planning.memory_plan import CUDA_BASE
    from rlhf.planning.rollout_memory import ENGINE_BASE

    need("vllm")
    model = place.model("1.5b", QWEN_1_5B)
    overrides = [text for text in place.overrides(model, "vllm") if text != "rollout=embedded"]
    records = place.train([*overrides, "rollout=vllm", "trainer.total_training_steps=5"], listening(place.folder))
    apart = max(record["rollout/logprob_diff_mean"] for record in records)
    sync = max(record["timing_s/update_weights"] for record in records[1:])
    place.goal(apart < 0.03, f"log-probs differ by {apart:.3g} on average; the goal is less than 0.03")
    place.goal(sync < 2, f"a weight sync takes {sync:.2f} s; the goal is less than 2 s")
    figures: Figures = {"log-prob difference, mean": apart, "seconds of a weight sync": sync}
    figures |= {name: records[-1][name] for name in ("timing_s/gen", "timing_s/step")}
    if not place.rehearsal:
        beside = [event["beside torch"] for event in events(place.folder) if event["event"] == "update.before"]
        planned = CUDA_BASE + ENGINE_BASE
        figures |= {"GiB outside torch while vLLM sleeps": max(beside) / GIB, "planned GiB": planned / GIB}
        place.goal(max(beside) <= planned, f"{max(beside) / GIB:.1f} GiB used outside torch, planned {planned / GIB}")
    return figures
