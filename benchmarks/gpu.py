"""python -m benchmarks.gpu: measures what only a GPU can show, in independent parts.

attention      forward and backward over 50 new lengths, by backend of scaled_dot_product_attention
varlen         one varlen_attn call for a packed row of 16k tokens, compared with a call per length: results, time
suite          tests/gpu
step           three steps of a random 0.5B policy with GSM8K's lengths: MFU, share of time with a kernel (goal 80 %)
save           an asynchronous save of a 1.5B policy: how long training waits, host memory, time relative to cp and sync
lora           adapters of a random 7B policy at 16k tokens: memory peak against the plan (goal: within 10 %), MFU
fragmentation  ragged micro-batches: memory that torch reserves, relative to memory that it allocates
contents       every subset of checkpoint.contents; random generators of all GPUs; EMA weights of the reference
kills          SIGKILL in a generation and in a save: equal bits, no GPU memory still in use
vllm           five steps with vLLM in the rank: log-probs (goal: < 0.03 apart), weight sync (goal: < 2 s), sleep memory

Nothing is downloaded: models have random weights, and the bundled tokenizer. Each part runs in a process of its own for
at most eight minutes. Its figures, the goals that it missed, and the releases are appended to --results as a line of
JSON. A part whose package is missing is skipped. Exits with 2 without a GPU, and with 1 if a part failed or missed a
goal. `--rehearse` runs the parts on a CPU with tiny models, to test this command: its figures mean nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import kernels, runs, state
from benchmarks.gpu_parts.place import Figures, Place, Skipped

PARTS: dict[str, Callable[[Place], Figures]] = {
    "attention": kernels.attention,
    "varlen": kernels.varlen,
    "suite": runs.suite,
    "step": runs.step,
    "save": state.save,
    "lora": runs.lora,
    "fragmentation": runs.fragmentation,
    "contents": state.contents,
    "kills": state.kills,
    "vllm": runs.vllm,
}
PACKAGES = ("rlhf", "torch", "transformers", "vllm", "peft", "deepspeed")
LIMIT_S = 480
NO_GPU = 2


def releases() -> dict[str, str]:
    """Return the versions of Python and of the installed packages."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def run_here(name: str, *, rehearsal: bool) -> dict[str, Any]:
    """Run a part in this process, and return its line of the results."""
    started = time.perf_counter()
    line: dict[str, Any] = {"part": name, "rehearsal": rehearsal}
    with tempfile.TemporaryDirectory(prefix="rlhf-gpu-") as folder:
        place = Place(Path(folder), rehearsal)
        try:
            line |= {"figures": PARTS[name](place), "missed": place.problems}
        except Skipped as reason:
            line["skipped"] = str(reason)
        except Exception:  # an error in one part must not end the other parts
            line |= {"error": traceback.format_exc()[-3000:], "missed": place.problems}
    return line | {"seconds": round(time.perf_counter() - started, 1)}


def run_apart(name: str, *, rehearsal: bool) -> dict[str, Any]:
    """Run a part in a process of its own, within the limit of time."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--here", *(["--rehearse"] if rehearsal else [])]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"part": name, "error": f"took more than {LIMIT_S} s", "seconds": LIMIT_S}
    except (IndexError, ValueError):
        return {"part": name, "error": f"ended with {done.returncode} and no result: {done.stdout[-1000:]}"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given several times")
    parser.add_argument("--results", type=Path, default=Path("gpu-results.jsonl"), help="file to append to")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.part or list(PARTS)
    if arguments.here:
        sys.stdout.write(json.dumps(run_here(names[0], rehearsal=arguments.rehearse)) + "\n")
        return 0
    facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "releases": releases()}
    if not arguments.rehearse:
        import torch

        if not torch.cuda.is_available():
            sys.stderr.write("error: torch finds no GPU here. Use a machine with a GPU, and a CUDA build of torch.\n")
            return NO_GPU
        facts |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    failed = False
    for name in names:
        line = run_apart(name, rehearsal=arguments.rehearse)
        with arguments.results.open("a") as file:
            file.write(json.dumps(facts | line) + "\n")
        verdict = line.get("skipped") or line.get("error") or "; ".join(line.get("missed", [])) or "ok"
        failed |= "error" in line or bool(line.get("missed"))
        sys.stdout.write(f"{name} ({line.get('seconds', 0):.0f} s): {verdict}\n")
        sys.stdout.writelines(f"  {figure}: {value}\n" for figure, value in line.get("figures", {}).items())
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
