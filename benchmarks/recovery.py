"""python -m benchmarks.recovery: times the phases from a rank's SIGKILL to the next optimizer step, and a cold start.

A small run of the bundled policy saves at step 3. Its last rank is killed in step 6, and the supervisor restarts all
ranks. Both columns and the ratio of the two totals are medians over the same runs, with minimum and maximum in
brackets. The phases of rank 0:

detection       until the supervisor has detected the crash and every rank has ended
start           until the new process exists; after a crash with the wait of trainer.restart_backoff_s, in a cold start
                with the imports of supervisor and launcher
import          until the rank has finished its imports; plain starts (trainer.warm_start=false) import here
build           until model, data and all other components are built
load            loading the checkpoint
first step      until the first optimizer step; the sum up to here is the total
replay          from the first step to the point where the kill came: the lost work
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import ratios, spread

SAVED, KILLED, STEPS = 3, 6, 7
EVENT = "update.before"
FOLDER_VARIABLE = "RLHF_BENCHMARK_FOLDER"
COLD = ("start", "import", "build", "first step", "total")
PHASES = ("detection", "start", "import", "build", "load", "first step", "total", "replay")


def process_started() -> float:
    """Return the start time of this process in seconds since the epoch, to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - since_boot


def write(folder: Path, **entry: object) -> None:
    """Append an entry to the ranks' notes."""
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "rank": int(os.environ["RANK"]), **entry}) + "\n")


_seen = 0


def on_event(event: str) -> None:
    """Note the times of rank 0's events, and kill the last rank once."""
    global _seen
    folder = Path(os.environ[FOLDER_VARIABLE])
    if os.environ["RANK"] == "0" and event in ("step.begin", EVENT, "update.after"):
        write(folder, event=event)
    if event == EVENT and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        _seen += 1
        if _seen == KILLED and not (folder / "killed").exists():
            (folder / "killed").touch()
            write(folder, event="kill")
            os.kill(os.getpid(), signal.SIGKILL)


if FOLDER_VARIABLE in os.environ and os.environ.get("RANK") == "0":
    write(Path(os.environ[FOLDER_VARIABLE]), event="imported", started=process_started())


def run(folder: Path, ranks: int, more: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each phase of one run's recovery and cold start."""
    pairs = [(10 + (7 * i) % 83, 10 + (11 * i) % 79) for i in range(40)]
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        *(sys.executable, "-m", "rlhf.train", f"trainer.default_local_dir={folder}", f"trainer.nproc={ranks}"),
        *(f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={SAVED}", "trainer.test_freq=0"),
        *(f"data.train_files={folder}/sums.jsonl", "reward=exact_match", "data.train_batch_size=8", "rollout.n=4"),
        *("actor.ppo_mini_batch_size=8", "trainer.experiment_name=recovery", "checkpoint.async_save=false", *more),
    ]
    listener = {"RLHF_EVENT_LISTENER": "benchmarks.recovery:on_event", FOLDER_VARIABLE: str(folder)}
    began, crashed, lines = time.time(), 0.0, []
    with subprocess.Popen(
        command, env=os.environ | listener, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if " Crash: " in line and not crashed:
                crashed = time.time()
    if process.returncode or not crashed or not any(" Resumed step " in line for line in lines):
        raise RuntimeError("the run did not recover:\n" + "".join(lines[-30:]))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    history = [json.loads(line) for line in (folder / "rlhf" / "recovery" / "metrics.jsonl").read_text().splitlines()]
    load = next(record["perf/load_seconds"] for record in history if "perf/load_seconds" in record)
    killed, restart = time_of(events, "kill"), [entry["event"] for entry in events].index("imported", 1)
    first, second = events[:restart], events[restart:]
    cold = starting(first, began)
    cold["total"] = time_of(first, "update.after") - began
    warm = starting(second, crashed)
    warm |= {
        "detection": crashed - killed,
        "build": warm["build"] - load,
        "load": load,
        "total": time_of(second, "update.after") - killed,
        "replay": time_of(second, EVENT, KILLED - SAVED) - time_of(second, "step.begin"),
    }
    return warm, cold


def starting(events: list[dict], since: float) -> dict[str, float]:
    """Return the phases that cold starts and recoveries share."""
    process = next(entry["started"] for entry in events if entry["event"] == "imported")
    return {
        "start": process - since,
        "import": time_of(events, "imported") - process,
        "build": time_of(events, "step.begin") - time_of(events, "imported"),
        "first step": time_of(events, "update.after") - time_of(events, "step.begin"),
    }


def time_of(events: list[dict], event: str, number: int = 1) -> float:
    """Return the time of the `number`th `event`."""
    return [entry["time"] for entry in events if entry["event"] == event][number - 1]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="settings for all runs, after --")
    arguments = parser.parse_args()
    sys.stdout.write(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start\n")
    for ranks in arguments.ranks:
        outcomes = []
        for _ in range(arguments.repeats):
            with tempfile.TemporaryDirectory() as folder:
                outcomes.append(run(Path(folder), ranks, arguments.overrides))
        title = f"\n## {ranks} rank{'s' if ranks > 1 else ''}, {arguments.repeats} runs\n\n"
        sys.stdout.write(title + "| phase | after SIGKILL | cold start |\n|---|---|---|\n")
        for phase in PHASES:
            warm = spread([recovery[phase] for recovery, _ in outcomes], ".2f")
            cold = f"{spread([cold[phase] for _, cold in outcomes], '.2f')} s" if phase in COLD else ""
            sys.stdout.write(f"| {phase} | {warm} s | {cold} |\n")
        totals = [[figures["total"] for figures in column] for column in zip(*outcomes, strict=True)]
        sys.stdout.write(f"\nA recovery takes {spread(ratios(*totals), '.2f')} times as long as a cold start.\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
