"""Starts training from a test: `train` like a user, `ranks` like torchrun, forked from a server with warm imports."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.storage.layout import scan, step_of
from tests.support.preload import forkserver

ROOT = Path(__file__).resolve().parents[2]
TINY_POLICY = ROOT / "rlhf" / "models" / "tiny_policy"
DEADLINE_S = 300
STEPS = 7
SAVE_FREQ = 3


@dataclass(frozen=True)
class Ended:
    """End of a start: the first exit code, negative for a signal, and all output."""

    code: int
    output: str


def write_sums(path: Path, count: int = 30) -> Path:
    """Write a JSONL file with prompt/answer pairs for the bundled policy."""
    pairs = [(10 + (7 * i) % 83, 10 + (11 * i) % 79) for i in range(count)]
    rows = [{"prompt": question(a, b), "answer": str(a + b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def policy_that_blocks_loading(folder: Path) -> Path:
    """Copy the bundled policy with a pipe as second chat template.

    A run waits at the pipe until stopped, before heavy imports and before ranks start.
    """
    shutil.copytree(TINY_POLICY, folder)
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "waits.jinja")
    return folder


def question(a: int, b: int) -> str:
    """Return a sum in the wording of the bundled policy's training."""
    return f"State the final answer to the following arithmetic problem: {a} + {b} ="


def small(folder: Path, name: str, sums: Path, *more: str) -> list[str]:
    """Return the arguments of a run of a few seconds that depends on all state of a checkpoint, such as mini-batches,
    schedule and reference."""
    return [
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVE_FREQ}",
        "trainer.device=cpu",
        "trainer.threads_per_rank=1",
        f"data.train_files={sums}",
        "reward=exact_match",
        "data.train_batch_size=8",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=4",
        "actor.use_kl_loss=true",
        "actor.optim.lr_scheduler_type=cosine",
        "actor.optim.lr_warmup_steps=3",
        *more,
    ]


def train(
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    program: Sequence[str] = (),
    module: str = "rlhf.train",
) -> Ended:
    """Run `python [PROGRAM] -m rlhf.train ARGUMENTS`, or another command `module`; `program` may be torchrun."""
    command = [sys.executable, *program, "-m", module, *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    return Ended(done.returncode, done.stdout)


def ranks(
    log: Path,
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    nproc: int = 1,
    folder: Path = ROOT,
) -> Ended:
    """Run the same command in `folder` in `nproc` ranks with torchrun's variables but without torchrun.

    The ranks write their output to the file `log`.
    """
    log.unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    unwatched = [*arguments, "trainer.watchdog=false"]  # tests/faults/test_hang_under_torchrun.py tests the watchdog
    world = {"WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | (environment or {})
    processes = [
        forkserver.Process(
            target=_rank,
            args=(unwatched, world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, str(log), folder),
        )
        for rank in range(nproc)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    stuck = [process for process in processes if process.exitcode is None]
    for process in stuck:
        process.kill()
    output = log.read_text()
    assert not stuck, f"ranks hang:\n{output}"
    codes = [process.exitcode for process in processes]
    return Ended(next((code for code in codes if code), 0), output)  # type: ignore[misc]


def _rank(arguments: list[str], environment: dict[str, str], log: str, folder: Path) -> None:
    os.chdir(folder)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(environment)
    from rlhf.train import main

    code = main(arguments)
    logging.shutdown()
    os._exit(code)


def records(run_dir: Path) -> list[dict]:
    """Return the metric history."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps of the published checkpoints, newest first."""
    return [step for path in scan(run_dir) if (step := step_of(path)) is not None]


def copy_run(source: Path, target: Path, last_step: int) -> Path:
    """Copy `source` as a kill would have left it, without checkpoints after `last_step`."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.lock", "status"))
    for step in saved_steps(target):
        if step > last_step:
            shutil.rmtree(target / f"global_step_{step}")
    return target


def flip_a_byte(path: Path) -> None:
    """Change one byte of a file, like a bad disk."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
