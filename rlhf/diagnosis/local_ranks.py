"""Starts ranks on this machine for the collective test: one for each visible GPU, or two on a machine without GPUs.

`python -m rlhf.diagnosis.local_ranks DEVICE` is one rank. Rank 0 writes the outcomes to stdout as JSON.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.diagnosis.check_result import Outcome, error
from rlhf.planning.devices import count_gpus
from rlhf.ranks.parent import PARENT_PID, die_with_parent
from rlhf.ranks.world import listening_socket, rank_variables

WITHOUT_GPUS = 2
"""Ranks on a machine without GPUs: the fewest that can communicate."""
START_S = 60.0
"""Seconds for the imports of the ranks."""


def check_collectives(device: str, deadline_s: float) -> Iterator[Outcome]:
    """Start the ranks, and report the outcomes of their test. An error names a rank that dies or is late.

    Args:
        device: `trainer.device`.
        deadline_s: seconds after which the ranks are killed.
    """
    gpus = 0 if device == "cpu" else count_gpus()
    number = gpus or WITHOUT_GPUS
    with listening_socket() as listener, contextlib.ExitStack() as files:
        answers = [files.enter_context(tempfile.TemporaryFile()) for _ in range(number)]
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(number)]
        ranks = []
        try:
            for rank in range(number):
                environ = os.environ | rank_variables(rank, number, listener) | {PARENT_PID: str(os.getpid())}
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "rlhf.diagnosis.local_ranks", device],
                        env=environ | {"OMP_NUM_THREADS": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=answers[rank],
                        stderr=errors[rank],
                        pass_fds=[listener.fileno()],
                        start_new_session=True,
                    )
                )
            problem = _await(ranks, errors, deadline_s)
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if problem is not None:
            yield error(f"{problem} Check nvidia-smi and dmesg." if gpus else problem)
            return
        yield from (Outcome(**each) for each in json.loads(_text(answers[0])))


def _await(ranks: Sequence[subprocess.Popen[bytes]], errors: Sequence[IO[bytes]], deadline_s: float) -> str | None:
    """Wait for the ranks. Return a sentence about a rank that failed or all that did not end; None if all succeeded."""
    end = time.monotonic() + deadline_s
    running = set(range(len(ranks)))
    while running:
        for rank in sorted(running):
            code = ranks[rank].poll()
            if code is not None:
                running.discard(rank)
            if code:
                last = _text(errors[rank]).strip().splitlines()[-1:]
                return f"rank {rank} ended with exit code {code}{': ' if last else ''}{''.join(last)}."
        if time.monotonic() > end:
            return f"rank {', '.join(map(str, sorted(running)))} did not end within {deadline_s:g} s."
        time.sleep(0.05)
    return None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def main(device: str) -> None:
    """Run one rank of the test."""
    die_with_parent()
    from rlhf.diagnosis.collective_test import run_collective_test
    from rlhf.diagnosis.store_transport import StoreTransport, open_store
    from rlhf.ranks.coordinator import Coordinator

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    transport = StoreTransport(open_store(START_S), rank, world_size, START_S)
    coordinator = Coordinator(transport)
    outcomes = run_collective_test(TrainerConfig(device=device), coordinator, range(world_size))
    transport.leave(5.0)
    if rank == 0:
        os.write(1, json.dumps([dataclasses.asdict(each) for each in outcomes]).encode())
    os._exit(0)  # after a hang, the thread of the test would wait forever for its peers


if __name__ == "__main__":
    main(sys.argv[1])
