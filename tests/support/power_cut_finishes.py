"""Restarts real training after simulated power cuts, which must end like the undisturbed run, bit for bit."""

import logging
import os
import pickle
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.compare_runs import differences
from tests.support.launching import DEADLINE_S, ranks, small, write_sums
from tests.support.power_cut_records import Record, verified
from tests.support.power_cut_states import Disk, Shelf, Tree, states
from tests.support.preload import forkserver

STEPS = 4
# Batches so small that file operations take more time than the model.
EVERY_RUN = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "data.train_batch_size=4",
    "data.max_response_length=8",
    "rollout.n=2",
    "actor.ppo_mini_batch_size=2",
    "checkpoint.max_to_keep=2",
)
RUNS = {
    "grpo": ("checkpoint.journal=true", "ref.update_freq=2", "ref.alpha=0.5"),
    "ppo": ("algorithm=ppo", "checkpoint.async_save=false", "trainer.test_freq=2"),
}


def finishes(count: int, seed: int, jobs: int, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Cut the power of `RUNS` at `count` points in total and continue to the end; yield each case and its errors."""
    folder.mkdir()
    sums = write_sums(folder / "sums.jsonl")
    for number, name in enumerate(RUNS):
        made = recorded(folder / name, name, sums)
        cuts = list(drawn(made, (count + number) // len(RUNS), random.Random(f"{name} {seed}")))
        with ThreadPoolExecutor(jobs) as beside:
            starts = [(made, sums, f"cut-{i}", moment, tree) for i, (moment, tree) in enumerate(cuts)]
            yield from beside.map(lambda start: finished(*start), starts)


def command(folder: Path, name: str, sums: Path) -> list[str]:
    return small(folder, name, sums, *EVERY_RUN, *RUNS[name])


def recorded(folder: Path, name: str, sums: Path) -> Record:
    """Record the undisturbed run in a separate process, with notes of published steps."""
    root, result = folder / "disk", folder / "record"
    root.mkdir(parents=True)
    environment = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    process = forkserver.Process(target=_record, args=(command(root, name, sums), environment, root, name, result))
    process.start()
    process.join(DEADLINE_S)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0, f"{name}: {process.exitcode}: {result.with_suffix('.log').read_text()}"
    return pickle.loads(result.read_bytes())


def _record(arguments: list[str], environment: dict[str, str], root: Path, name: str, result: Path) -> None:
    log = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    from rlhf import events
    from rlhf.train import main
    from tests.support.recorded_files import recording

    notes: list[tuple[int, str, int]] = []
    with recording(root) as recorder:

        def listen(event: str) -> None:
            if event == "commit.published":
                with recorder.lock:
                    targets = [op.other for op in recorder.ops if op.kind == "rename"]
                    steps = [re.fullmatch(r".*/global_step_(\d+)", target) for target in targets]
                    notes.append((len(recorder.ops), "published", max(int(step[1]) for step in steps if step)))

        events.subscribe(listen)
        code = main(arguments)
    if code == 0:
        result.write_bytes(pickle.dumps(verified(Record(name, root, recorder.ops, notes, {}), recorder)))
    logging.shutdown()
    os._exit(code)


def drawn(made: Record, count: int, rng: random.Random) -> Iterator[tuple[int, Tree]]:
    """Yield one state at each of `count` points spread over the record."""
    wanted = Counter(int((i + rng.random()) * len(made.ops) / count) + 1 for i in range(count))
    disk = Disk()
    for moment, op in enumerate(made.ops, 1):
        disk.apply(op)
        if moment in wanted:
            yield from ((moment, tree) for tree in rng.choices(list(states(disk, 8, rng)), k=wanted[moment]))


def finished(made: Record, sums: Path, name: str, moment: int, tree: Tree) -> tuple[str, list[str]]:
    """Run the command again in `tree`; return a description and the errors."""
    folder = made.root.parent / name
    shelf = Shelf(folder / "shelf")
    shelf.build(tree, folder / "disk", lambda path: False)
    ended = ranks(folder / "log", command(folder / "disk", made.kind, sums))
    resumed = re.search(r"(?:Resumed step|finished at step) (\d+)", ended.output)
    found = int(resumed[1]) if resumed else 0
    promised = max((step for number, _, step in made.notes if number <= moment), default=0)
    wrong = []
    if ended.code:
        wrong.append(f"exit code {ended.code}: {ended.output}")
    else:
        wrong += differences(folder / "disk" / "rlhf" / made.kind, made.root / "rlhf" / made.kind)
    if found < promised:
        wrong.append(f"step {found} is found, but {promised} was published")
    shutil.rmtree(folder)
    op = made.ops[moment - 1]
    return f"{made.kind} after operation {moment} of {len(made.ops)} ({op.kind} {op.path}): from step {found}", wrong
