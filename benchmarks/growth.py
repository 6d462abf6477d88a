"""python -m benchmarks.growth: compares starts with few and many rows and history lines, and measures a large batch.

`benchmarks/collecting.py` measures the batch. The starts run real commands with the bundled policy until every rank has
begun its first step (in a new run: its second). Their figures are from the start of the first step. `first` starts a
new run and builds the prompt cache, `start` starts a new run with the cache, `resume` continues a run with a long
metric history. CPU time and memory are the largest of any rank. RSS counts all touched pages of shared files, PSS the
rank's part of them. Figures are medians. Exits with 1 if `start` or `resume` needs over 2 s or 200 MB more with
many rows and lines than with few. On a busy machine CPU time is more reliable than wall time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlhf.storage.layout import HISTORY

FEW = 1000
LIMIT_S, LIMIT_MB = 2.0, 200.0
DEADLINE_S = 1800.0
Figures = tuple[float, float, float, float]
"""Wall seconds, CPU seconds, RSS and PSS in MB."""
FOLDER_VARIABLE, LINES_VARIABLE = "RLHF_BENCHMARK_FOLDER", "RLHF_BENCHMARK_LINES"


def on_event(event: str) -> None:
    """Record time and memory at the start of each step in every rank, and lengthen the history after step 1."""
    folder, rank = Path(os.environ[FOLDER_VARIABLE]), os.environ["RANK"]
    if event == "step.begin":
        memory = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        entry = {"time": time.time(), "cpu": time.process_time()}
        entry |= {"rss": int(memory["Rss:"]) / 1024, "pss": int(memory["Pss:"]) / 1024}
        with (folder / f"steps-{rank}").open("a") as file:
            file.write(json.dumps(entry) + "\n")
    history = next(folder.glob(f"rlhf/*/{HISTORY}"), None)
    if event == "metrics.after" and rank == "0" and history is not None and not (folder / "long").exists():
        # Lengthen the history before the save, so that the checkpoint of step 1 covers all lines.
        last = history.read_text().splitlines()[-1]
        record = json.dumps(json.loads(last) | {"step": 0})
        with history.open("w") as file:
            file.writelines(f"{line}\n" for line in [record] * int(os.environ[LINES_VARIABLE]) + [last])
        (folder / "long").touch()


def launch(folder: Path, data: Path, size: int, ranks: int, steps: int) -> Figures:
    """Run the command until each rank has begun `steps` steps, kill it, and return the figures of the first step."""
    for note in folder.glob("steps-*"):
        note.unlink()
    command = [
        *(sys.executable, "-m", "rlhf.train", f"trainer.default_local_dir={folder}", f"trainer.nproc={ranks}"),
        *("trainer.total_training_steps=1000", "trainer.save_freq=1", "trainer.test_freq=0"),
        *(f"data.train_files={data}/rows-{size}.jsonl", f"data.cache_dir={data}/cache", "reward=exact_match"),
        *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=2", "data.max_response_length=8"),
        *("checkpoint.async_save=false", "trainer.experiment_name=growth", "trainer.val_before_train=false"),
    ]
    listener = {"RLHF_EVENT_LISTENER": "benchmarks.growth:on_event", FOLDER_VARIABLE: str(folder)}
    log = folder / "log"
    began = time.time()
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=os.environ | listener | {LINES_VARIABLE: str(size)}, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            while True:
                notes = [note.read_text().splitlines() for note in sorted(folder.glob("steps-*"))]
                if len(notes) == ranks and all(len(lines) >= steps for lines in notes):
                    break
                if process.poll() is not None or time.time() - began > DEADLINE_S:
                    raise RuntimeError(f"the run did not reach step {steps}:\n{log.read_text()[-3000:]}")
                time.sleep(0.05)
        finally:
            process.kill()  # kills the ranks, too
    first = [json.loads(lines[0]) for lines in notes]
    wanted = "Resumed step 1 " if steps == 1 else ""
    if not (folder / "long").exists() or wanted not in log.read_text():
        raise RuntimeError(f"the history is short, or the run did not resume step 1:\n{log.read_text()[-3000:]}")
    cpu, rss, pss = (max(entry[name] for entry in first) for name in ("cpu", "rss", "pss"))
    return first[0]["time"] - began, cpu, rss, pss


def write_rows(path: Path, size: int) -> None:
    """Write `size` problems with solutions of two hundred characters."""
    with path.open("w") as file:
        for i in range(size):
            row = {"prompt": f"What is {i} + {i % 97}?", "answer": str(i + i % 97)}
            file.write(json.dumps(row | {"extra_info": {"index": i, "solution": "so " * 70}}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("starts", "batch"), help="only this part")
    parser.add_argument("--samples", type=int, default=4096, help="samples of the large batch")
    parser.add_argument("--length", type=int, default=4000, help="tokens of each of these samples")
    parser.add_argument("--many", type=int, default=1_000_000, help="rows, and lines of the history")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.part != "starts":
        from benchmarks.collecting import table

        sys.stdout.write(table(arguments.samples, arguments.length, arguments.repeats) + "\n")
    return 0 if arguments.part == "batch" else starts(arguments)


def starts(arguments: argparse.Namespace) -> int:
    """Measure starts and resumes. Return 1 if many rows and lines cost too much."""
    sizes = (FEW, arguments.many)
    sys.stdout.write(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {arguments.ranks} ranks\n\n")
    figures: dict[tuple[str, int], list[Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="rlhf-growth-") as scratch:
        data = Path(scratch)
        for size in sizes:
            write_rows(data / f"rows-{size}.jsonl", size)
        time.sleep(3)  # wait, because a start hashes recently changed files again
        for repeat in range(-1, arguments.repeats):
            for size in sizes:
                with tempfile.TemporaryDirectory(prefix="rlhf-growth-") as folder:
                    start = launch(Path(folder), data, size, arguments.ranks, steps=2)
                    figures.setdefault(("first" if repeat < 0 else "start", size), []).append(start)
                    if repeat >= 0:
                        resume = launch(Path(folder), data, size, arguments.ranks, steps=1)
                        figures.setdefault(("resume", size), []).append(resume)
    return report(figures, sizes)


def report(figures: dict[tuple[str, int], list[Figures]], sizes: tuple[int, int]) -> int:
    """Print the medians. Return 1 if many rows and lines cost too much."""
    failed = False
    sys.stdout.write("| | rows and lines | seconds | CPU | RSS | PSS |\n|---|---|---|---|---|---|\n")
    for kind in ("first", "start", "resume"):
        medians = {
            size: [statistics.median(column) for column in zip(*figures[kind, size], strict=True)] for size in sizes
        }
        for size, (seconds, cpu, rss, pss) in medians.items():
            sys.stdout.write(f"| {kind} | {size:,} | {seconds:.2f} s | {cpu:.2f} s | {rss:.0f} MB | {pss:.0f} MB |\n")
        more = [many - few for few, many in zip(*(medians[size] for size in sizes), strict=True)]
        seconds, cpu, rss, pss = more
        sys.stdout.write(f"| {kind} | more | {seconds:+.2f} s | {cpu:+.2f} s | {rss:+.0f} MB | {pss:+.0f} MB |\n")
        failed |= kind != "first" and (seconds > LIMIT_S or max(rss, pss) > LIMIT_MB)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
