"""Runs each kind of save as a small run of real code, while a `Recorder` records the operations below one folder."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rlhf.checkpoint.commit import pointer
from rlhf.checkpoint.commit.output_folder import output_folder
from rlhf.checkpoint.remote.lease import release_leases
from rlhf.checkpoint.save import disk_space
from rlhf.checkpoint.verbs.pruning import plan_pruning, remove_planned, run_at_rest
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_DONE
from rlhf.evaluate.results import RESULT, store_result
from rlhf.launch import supervisor
from rlhf.rollout.servers.secret import run_secret
from rlhf.storage.files import make_dir, write_file, write_small
from rlhf.storage.layout import RESOLVED, scan, step_dir
from rlhf.tracking.page import write_page
from tests.support.checkpoints import flip_bit
from tests.support.power_cut_runs import Book, Saved, Start, TinyRun, tiny_config
from tests.support.thread_ranks import run_thread_ranks
from tests.support.verified import verify

REMOTE = "remote"
"""The folder that simulates another machine."""


def start_of(root: Path, *, journal: bool = False, **settings: Any) -> Start:
    return Start((tiny_config(root, **settings),), journal)


def begin(book: Book, start: Start, trajectory: int = 0) -> TinyRun:
    """Run the command `start` and note it in `book`."""
    book.note("start", start)
    return TinyRun(start, trajectory=trajectory, book=book)


def plain(root: Path, book: Book) -> None:
    start = start_of(root, checkpoint__contents=["model", "optimizer", "extra", "hf_model"])
    run = begin(book, start)
    run.train(4, every=2)
    run.finish()


def behind(root: Path, book: Book) -> None:
    run = begin(book, start_of(root, checkpoint__async_save=True, checkpoint__max_to_keep=2))
    run.train(5)
    run.finish()


def linked(root: Path, book: Book) -> None:
    run = begin(book, start_of(root))
    run.train(2)  # the second save reuses the reference of the first
    # A new process learns only from its own resume which checkpoint it depends on.
    run = begin(book, start_of(root))
    run.train(2)
    run.finish()


def retention(root: Path, book: Book) -> None:
    run = begin(book, start_of(root, checkpoint__max_to_keep=1))
    run.train(4)
    run.finish()


def journal(root: Path, book: Book) -> None:
    run = begin(book, start_of(root, journal=True))
    run.train(3, every=2)
    run.fill_journal(4)


def history(root: Path, book: Book) -> None:
    run = begin(book, start_of(root))
    run.shows = True
    run.train(5, every=3)
    # As after a kill: records after the checkpoint are cut off and repeated.
    run = begin(book, start_of(root), trajectory=1)
    run.train(3, every=3)
    run.finish()


def overwrite(root: Path, book: Book) -> None:
    run = begin(book, start_of(root, journal=True))
    run.train(2, every=2)
    run.fill_journal(3)
    run.finish()
    book.note("only", [])
    run = begin(book, start_of(root, trainer__overwrite=True), trajectory=1)
    run.train(1)
    book.note("start", start_of(root))  # the same command again would delete the checkpoint
    run.train(1)
    run.finish()


def fork(root: Path, book: Book) -> None:
    """Fork in the source's own directory; later checkpoints are set aside."""
    run = begin(book, start_of(root))
    run.train(3)
    run.finish()
    fork_from(root, book, step_dir(run.config.run_dir, 2), book.saves[2], aside={3})


def fork_elsewhere(root: Path, book: Book) -> None:
    """Fork from another directory into a directory with checkpoints."""
    source = begin(book, start_of(root / "other"))
    source.train(2)
    book.note("only", [])
    run = begin(book, start_of(root), trajectory=1)
    run.train(2)
    fork_from(root, book, step_dir(source.config.run_dir, 2), book.saves[2], aside={3, 4})


def fork_from(root: Path, book: Book, path: Path, source: Saved, aside: set[int]) -> None:
    forked = start_of(root, trainer__resume_mode="resume_path", trainer__resume_from_path=str(path))
    history: list[dict] = []  # the fork's first history, once known
    book.note("kept", aside)
    book.note("only", [replace(source, history=history)])
    run = begin(book, forked, trajectory=5)
    history += run.history
    run.train(2)


def roll_back(root: Path, book: Book) -> None:
    run = begin(book, start_of(root, checkpoint__async_save=True))
    run.train(5, every=2)
    run.roll_back(trajectory=1)
    run.train(2, every=2)
    run.roll_back(trajectory=2)
    run.train(2, every=1)
    run.finish()


def first_start(root: Path, book: Book) -> None:
    """Start without a run directory."""
    run = begin(book, start_of(root / "a" / "b" / "c"))
    run.train(1)


def damaged(root: Path, book: Book) -> None:
    run = begin(book, start_of(root))
    run.train(2)
    run.finish()
    path = step_dir(run.config.run_dir, 2) / "actor" / "model" / "rank_00000.safetensors"
    book.note("also", book.saves[1])
    book.note("damage", True)
    flip_bit(path, 8 * 200)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    book.note("only", [book.saves[1]])
    run = begin(book, start_of(root), trajectory=1)
    run.train(2)


def room(root: Path, book: Book) -> None:
    """Save on a disk with room for another checkpoint only after the oldest is deleted."""
    run = begin(book, start_of(root, checkpoint__max_to_keep=2))
    run.train(2)
    run.finish()
    with little_room():
        run.train(1)
        run.finish()


def no_pointer(root: Path, book: Book) -> None:
    """Save on a disk that fails writes of the pointer, which must not keep its old content."""
    run = begin(book, start_of(root, checkpoint__max_to_keep=1))
    run.train(1)
    with mock.patch.object(pointer, "replace_durably", side_effect=OSError(errno.ENOSPC, "asked for by the test")):
        run.train(1)
    run.finish()


def pruned(root: Path, book: Book) -> None:
    """Prune by hand, when a kill has left a pointer to a pruned checkpoint."""
    run = begin(book, start_of(root))
    run.train(2)
    with mock.patch.object(pointer, "replace_durably", side_effect=OSError(errno.ENOSPC, "asked for by the test")):
        run.train(1)
    run.finish()
    run_dir = run.config.run_dir
    with run_at_rest(run_dir):
        rules = replace(run.config.checkpoint, max_to_keep=1)
        plan = plan_pruning(run_dir, rules, set_aside=True, verify=verify)
        assert [path.name for path in plan.checkpoints] == ["global_step_1", "global_step_2"]
        assert remove_planned(plan) == []


def domains(root: Path, book: Book) -> None:
    """Save on two nodes with separate disks."""
    start = on_nodes(root, (0, 1))
    ranks(start, book, lambda run: run.train(3))


def swapped(root: Path, book: Book) -> None:
    """Swap two nodes, which moves the driver's history, too."""
    ranks(on_nodes(root, (0, 1)), book, lambda run: run.train(2))
    ranks(on_nodes(root, (1, 0)), book, lambda run: run.train(1), trajectory=1)


def on_nodes(root: Path, nodes: tuple[int, ...]) -> Start:
    return Start(tuple(tiny_config(root / f"node_{node}", checkpoint__max_to_keep=2) for node in nodes))


def ranks(start: Start, book: Book, work: Callable[[TinyRun], None], trajectory: int = 0) -> None:
    """Run `work` on each rank of `start`."""

    def rank(number: int) -> None:
        run = TinyRun(start, number, trajectory, book)
        work(run)
        run.finish()

    book.note("start", start)
    run_thread_ranks(len(start.configs), rank)


def remote(root: Path, book: Book) -> None:
    """Save with remote copies, keeping the newest two."""
    start = start_of(
        root,
        checkpoint__remote=f"file://{root}/{REMOTE}",
        checkpoint__remote_max_to_keep=2,
        checkpoint__max_to_keep=1,
    )
    run = begin(book, start)
    run.train(2)
    run.finish()
    book.note("copied", book.saves[2])
    run = begin(book, start, trajectory=1)
    run.train(2)
    run.finish()
    book.note("copied", book.saves[4])


def fetched(root: Path, book: Book) -> None:
    """Start on another machine, which downloads the newest copy to its empty disk."""
    remote(root, book)
    release_leases()
    book.note("only", [book.saves[4]])
    run = begin(book, start_of(root / "another", checkpoint__remote=f"file://{root}/{REMOTE}"), trajectory=2)
    run.train(1)
    run.finish()


def supervised(root: Path, book: Book) -> None:
    """Write the supervisor's files, with ranks in the supervisor's process."""
    resolved: set[bytes] = set()
    folder = "rlhf/default"
    for steps in (2, 3):
        start = start_of(root, trainer__total_training_steps=steps, trainer__warm_start=False)
        resolved.add(to_yaml(start.config).encode())
        book.note("start", start)
        book.note("whole", (f"{folder}/{RESOLVED}", resolved.copy().__contains__))

        def attempts(*_: Any, start: Start = start, steps: int = steps) -> int:
            run = TinyRun(start, trajectory=steps, book=book)
            run.train(steps - run.driver.step)
            run.finish()
            return EXIT_DONE

        with mock.patch.object(supervisor, "run_attempts", attempts):
            assert supervisor.supervise(start.config, lambda: None) == EXIT_DONE
        for name, whole in (("report.json", is_json), ("report.html", is_page)):
            book.note("whole", (f"{folder}/report/{name}", whole))
            book.note("there", f"{folder}/report/{name}")


def secret(root: Path, book: Book) -> None:
    """Write the secret of rollout servers, readable for the owner only."""
    run = begin(book, start_of(root))
    name = "rlhf/default/secret"
    book.note("whole", (name, lambda content: len(content) == 64))
    run_secret(root / name)
    run.train(1)
    run.finish()


def evaluated(root: Path, book: Book) -> None:
    """Store the result of an evaluation, which the same command must not compute again."""
    start = start_of(root)
    run = begin(book, start)
    run.train(1)
    run.finish()
    name = f"rlhf/default/{RESULT}"
    book.note("whole", (name, is_json))
    planned = SimpleNamespace(config=start.config, target=SimpleNamespace(name="model", checkpoint=None, step=1))
    store_result(planned, {})  # type: ignore[arg-type]
    book.note("there", name)


def compared(root: Path, book: Book) -> None:
    """Write a page of runs twice into one file."""
    start = start_of(root)
    run = begin(book, start)
    run.train(1)
    run.finish()
    write_file(start.config.run_dir, RESOLVED, [to_yaml(start.config).encode()])
    book.note("whole", ("runs.html", is_page))
    for _ in range(2):
        write_page(root / "runs.html", [start.config.run_dir])
        book.note("there", "runs.html")


def exported(root: Path, book: Book) -> None:
    """Export folders with a verb of the checkpoint command; one folder replaces an earlier folder."""
    run = begin(book, start_of(root))
    run.train(1)
    run.finish()
    for name, number in (("a/b/model", 1), ("model", 2), ("model", 3)):
        weights = bytes([number]) * 9000
        book.note("whole", (f"{name}/config.json", is_json))
        book.note("whole", (f"{name}/more/weights", lambda content: len(content) == 9000 and len(set(content)) == 1))
        with output_folder(root / name, overwrite=True) as folder:
            write_file(folder, "config.json", [b'{"number": %d}\n' % number])
            make_dir(folder / "more")
            write_small(folder / "more" / "weights", weights)
        # The third export replaces the second: the old and the new folder exchange their names.
        book.note("there", f"{name}/config.json")
        book.note("there", f"{name}/more/weights")


def is_json(content: bytes) -> bool:
    try:
        return content.endswith(b"\n") and bool(json.loads(content))
    except ValueError:
        return False


def is_page(content: bytes) -> bool:
    return content.startswith(b"<!doctype html>") and content.endswith(b"</html>") and bytes(64) not in content


def restarted(start: Start, book: Book, *, short_of_room: bool) -> None:
    """Run the same command again, twice with one saved step each; on several nodes once."""
    if len(start.configs) > 1:
        ranks(start, book, lambda run: run.train(1), trajectory=6)
        return
    run = begin(book, start, trajectory=6)
    may_go = start.config.checkpoint.max_to_keep is not None
    with little_room() if short_of_room and may_go else nullcontext():
        run.train(1)
        run.finish()
    run = begin(book, start, trajectory=7)
    run.train(1)
    run.finish()


@contextmanager
def little_room() -> Iterator[None]:
    """Simulate a disk that is full until one of two checkpoints is deleted."""
    counts: list[int] = []

    def free(run_dir: Path) -> int:
        counts.append(len(scan(run_dir)))
        return 0 if counts[-1] == counts[0] > 1 else 1 << 40

    with (
        mock.patch.object(disk_space, "_free", free),
        mock.patch.object(disk_space, "bytes_freed_by", lambda paths: len(paths) << 40),
    ):
        yield


KINDS: dict[str, Callable[[Path, Book], None]] = {
    kind.__name__: kind
    for kind in (
        plain,
        behind,
        linked,
        retention,
        journal,
        history,
        overwrite,
        fork,
        fork_elsewhere,
        roll_back,
        first_start,
        damaged,
        room,
        no_pointer,
        pruned,
        domains,
        swapped,
        remote,
        fetched,
        supervised,
        secret,
        evaluated,
        compared,
        exported,
    )
}
