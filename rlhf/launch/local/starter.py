"""Starts the ranks on this machine: forks of a launcher with the imports done, or new processes if forks are unsafe."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from rlhf.config import BackendConfig, DataConfig, RolloutConfig, TrainerConfig
from rlhf.errors import UserError
from rlhf.launch.interface import Ranks
from rlhf.launch.local.launcher_process import ForkedRanks, LauncherProcess
from rlhf.launch.local.processes import PlainRanks
from rlhf.launch.local.rank_output import RankOutput
from rlhf.launch.local.server_keeper import ServerKeeper
from rlhf.launch.stop_request import StopRequest
from rlhf.planning.devices import devices_problem, usable_cores
from rlhf.ranks.launch_messages import CountDevices, Devices, Fork, Forked
from rlhf.ranks.lock import wait_for_ranks
from rlhf.ranks.parent import SUPERVISOR_PID
from rlhf.ranks.status import clear_statuses

_LOOK_S = 0.1
# Give up a launcher that is stopped in this many checks in a row, 0.1 s apart. With fewer checks, a short pause of the
# whole run would count.
_STOPPED_LOOKS = 30
# With the default handler of SIGINT, Ctrl-C leaves no traceback of this process on the terminal.
_COUNT_GPUS = """
import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)
import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
"""

A = TypeVar("A", Forked, Devices)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankNeeds:
    """Modules and environment variables of the ranks, and whether a launcher may fork the ranks."""

    modules: Sequence[str]
    """Modules that the launcher imports, for the ranks that it forks."""
    variables: Mapping[str, str]
    """Environment variables of the ranks."""
    no_fork_reason: str | None
    """The reason why ranks cannot be forked; None if they can."""
    servers: bool = False
    """Whether the ranks start rollout servers, which outlive the ranks."""

    @classmethod
    def of(
        cls, trainer: TrainerConfig, data: DataConfig, backend: BackendConfig, rollout: RolloutConfig
    ) -> "RankNeeds":
        servers = rollout.name == "vllm_server" and not rollout.servers.urls
        return cls(
            _modules(trainer, data, backend), _variables(trainer, backend), _no_fork_reason(trainer, rollout), servers
        )


class LocalStarter:
    """A `RankStarter` of processes on this machine. While entered, runs a launcher if the ranks may be forked.

    If a launcher ends, its ranks die with it, and the next `start` starts a new launcher.

    Args:
        output: receives what the ranks print; with None, they print to this process's stdout and stderr.
        expected: False if the run seems finished: the launcher then starts only when ranks are needed after all.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        run_dir: Path,
        needs: RankNeeds,
        output: RankOutput | None = None,
        *,
        expected: bool = True,
    ) -> None:
        self._trainer, self._run_dir, self._output, self._expected = trainer, run_dir, output, expected
        self._modules, self._variables = needs.modules, dict(needs.variables)
        self._no_fork_reason = needs.no_fork_reason
        self._keeper = ServerKeeper() if needs.servers else None
        self._launcher: LauncherProcess | None = None
        self._ignored_ends = False

    def __enter__(self) -> Self:
        # A process inherits an ignored SIGCHLD. Then every exit code is lost, and a crash looks like a success.
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            if threading.current_thread() is not threading.main_thread():
                raise UserError(
                    "rlhf.train: this process ignores SIGCHLD, and would lose the exit codes of its ranks. Call "
                    "signal.signal(signal.SIGCHLD, signal.SIG_DFL) in its main thread first."
                )
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._ignored_ends = True
        if self._expected:
            self._launch()
        return self

    def _launch(self) -> None:
        if self._no_fork_reason is None and (self._launcher is None or self._launcher.exit is not None):
            self._launcher = LauncherProcess(self._modules, self._variables, self._output)

    def __exit__(self, *_: object) -> None:
        if self._launcher is not None:
            self._launcher.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._ignored_ends:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def show_remaining_output(self, *, last: bool) -> None:
        if self._output is not None:
            self._output.drain()
            if last:
                self._output.end_bar()

    def start(self, command: Sequence[str], stop: StopRequest) -> Ranks | None:
        if not self._expected:
            self._expected = True
            self.check_devices()
        clear_statuses(self._run_dir)
        if self._output is not None:
            self._output.phase("starting the ranks")
        if self._keeper is not None:
            self._variables |= self._keeper.start()
        self._launch()
        if self._launcher is not None:
            ranks = self._fork(self._launcher, command, stop)
            if ranks is not None or stop.signal_name is not None:
                return ranks
            wait_for_ranks(self._run_dir)  # the launcher may have forked some ranks before it was given up
        log.info("The ranks start as new processes, without a launcher: %s.", self._no_fork_reason)
        return PlainRanks(command, self._trainer.ranks, self._variables, self._run_dir, self._output)

    def _fork(self, launcher: LauncherProcess, command: Sequence[str], stop: StopRequest) -> ForkedRanks | None:
        nproc = self._trainer.ranks
        request = Fork(tuple(command), nproc, dict(self._variables))
        answer = self._answer(launcher, request, Forked, lambda: stop.signal_name is not None)
        if answer is not None and answer.problem is not None:
            self._give_up(launcher, answer.problem)
        if self._launcher is None or (answer is None and stop.signal_name is not None):
            return None
        return ForkedRanks(launcher, nproc, {} if answer is None else answer.pids, self._run_dir)

    def _answer(
        self, launcher: LauncherProcess, request: Fork | CountDevices, kind: type[A], stopped: Callable[[], bool]
    ) -> A | None:
        """Return the answer; None if the launcher ends, is stopped or too slow, or if `stopped` returns True."""
        launcher.send(request)
        timeout_s = self._trainer.watchdog_first_timeout_s
        end, looks = time.monotonic() + timeout_s, 0
        while launcher.exit is None and not stopped():
            if isinstance(answer := launcher.receive(_LOOK_S), kind):
                return answer
            looks = looks + 1 if launcher.is_stopped else 0
            if looks >= _STOPPED_LOOKS:
                self._give_up(launcher, "it is stopped, as by SIGSTOP or a debugger")
            elif time.monotonic() > end:
                self._give_up(launcher, f"its imports took more than trainer.watchdog_first_timeout_s={timeout_s:g}")
        return None

    def _give_up(self, launcher: LauncherProcess, problem: str) -> None:
        self._no_fork_reason = f"the launcher cannot fork the ranks, because {problem}"
        launcher.close()
        self._launcher = None

    def check_devices(self) -> None:
        """See `RankStarter`. Each rank needs a CUDA device of its own unless trainer.device is cpu."""
        t = self._trainer
        if t.device == "cpu" or not self._expected:
            return
        if problem := devices_problem(t, self._device_count()):
            raise UserError(problem)

    def _device_count(self) -> int:
        timeout_s = self._trainer.watchdog_first_timeout_s
        if (launcher := self._launcher) is not None:
            answer = self._answer(launcher, CountDevices(), Devices, lambda: False)
            if answer is not None and answer.problem is None:
                return answer.count
        try:
            done = subprocess.run(
                [sys.executable, "-c", _COUNT_GPUS], stdout=subprocess.PIPE, check=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"Counting the CUDA devices took more than trainer.watchdog_first_timeout_s={timeout_s:g}. "
                "Check `nvidia-smi`, or set trainer.device=cpu."
            ) from None
        return int(done.stdout)


def _no_fork_reason(trainer: TrainerConfig, rollout: RolloutConfig) -> str | None:
    if not trainer.warm_start:
        return "trainer.warm_start=false"
    if sys.platform != "linux":
        return "forking a process that has PyTorch loaded is safe on Linux only"
    if rollout.name == "vllm":
        return "rollout.name=vllm, and vLLM in the ranks starts threads and CUDA by itself"
    return None


def _modules(trainer: TrainerConfig, data: DataConfig, backend: BackendConfig) -> list[str]:
    """Return the modules that the launcher imports before it forks: slow imports that start no threads."""
    modules = ["rlhf.worker"]
    if data.train_files is None:
        modules.append("reasoning_gym")
    if backend.name == "deepspeed":
        modules.append("torch._inductor.compile_fx")  # DeepSpeed's optimizers import it
        if trainer.device != "auto":  # the import of DeepSpeed reads the device from DS_ACCELERATOR
            modules.append("deepspeed")
    return modules


def _variables(t: TrainerConfig, backend: BackendConfig) -> dict[str, str]:
    variables = {
        SUPERVISOR_PID: str(os.getpid()),
        "OMP_NUM_THREADS": str(
            t.threads_per_rank or os.environ.get("OMP_NUM_THREADS") or max(1, usable_cores() // t.ranks)
        ),
        # By default libgomp's threads spin at barriers, which is very slow once another process needs their core.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        # NumPy's OpenBLAS starts its threads on import, and the launcher must have no threads when it forks.
        "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        # Some reasoning-gym tasks draw different problems with different hash seeds.
        "PYTHONHASHSEED": "0",
    }
    if backend.name == "deepspeed" and t.device != "auto":
        variables["DS_ACCELERATOR"] = t.device
    return variables
