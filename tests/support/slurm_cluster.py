"""Runs SLURM's own daemons for tests: a controller and two nodes on this machine, in a folder of the test."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE_S

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2")
START_S = 60
REVOKED_S = 3
"""Seconds after a job's end until its nodes let the same job start again. The nodes count whole seconds."""
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
MinJobAge=600
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=64 RealMemory=1000 Gres=gpu:8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=64 RealMemory=1000 Gres=gpu:8 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Return why SLURM's daemons cannot run here; None if they can."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        return f"SLURM is not installed: no {', '.join(missing)} (CONTRIBUTING.md)"
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    unshared = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True)
    return None if unshared.returncode == 0 else "namespaces for SLURM's nodes are not allowed here"


needs_slurm = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


class Cluster:
    """A running cluster. Its jobs write their logs into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
        """Run a command with SLURM's programs in `folder`."""
        variables = {**self.environment, **(environment or {})}
        return subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=120)

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job, such as JobState, ExitCode and Restarts."""
        shown = self.run(["scontrol", "show", "--oneliner", "job", number])
        assert shown.returncode == 0, shown.stderr
        return dict(re.findall(r"(\w+)=(\S+)", shown.stdout.splitlines()[0]))

    def wait(self, number: str, deadline_s: float) -> dict[str, str]:
        """Return the fields of the job after its end."""
        return self.wait_until(number, lambda: False, deadline_s)

    def wait_until(self, number: str, happened: Callable[[], bool], deadline_s: float = DEADLINE_S) -> dict[str, str]:
        """Return the job's fields once `happened()` is true or the job has ended. A requeued job starts again after
        `REVOKED_S`, not after SLURM's two minutes."""
        end, requeued_at = time.monotonic() + deadline_s, None
        while time.monotonic() < end:
            job = self.job(number)
            if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":
                requeued_at = requeued_at or time.monotonic()
                if time.monotonic() > requeued_at + REVOKED_S:
                    self.run(["scontrol", "update", f"JobId={number}", "StartTime=now"])
                    requeued_at = None
            elif happened() or job["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
                return job
            time.sleep(0.3)
        raise AssertionError(f"job {number}: {job}\n{self.logs()}")

    def logs(self) -> str:
        """Return the logs of all jobs."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("rlhf-*.log")))


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start the daemons with their files in `folder`, and stop them in the end."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_files(folder)
    made = Cluster(folder)
    with ExitStack() as stack:

        def daemon(*command: str) -> None:
            log = stack.enter_context((folder / "daemons.log").open("a"))
            process = subprocess.Popen(command, env=made.environment, stdout=log, stderr=log, start_new_session=True)
            stack.callback(_stop, process)

        munge = folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        daemon("/usr/sbin/munged", "--foreground", "--force", *(f"--{k}={munge / v}" for k, v in files.items()))
        _await(lambda: (munge / "socket").exists(), folder)
        daemon("/usr/sbin/slurmctld", "-D", "-c")
        for name in NODES:
            node = f"hostname {name}; mount --bind {folder}/hosts /etc/hosts; exec /usr/sbin/slurmd -D -N {name}"
            daemon("unshare", "--mount", "--uts", "sh", "-c", node)
        _await(lambda: made.run(["sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D"]).stdout.strip() == "2", folder)
        yield made
        made.run(["scancel", "--state=PENDING"])
        made.run(["scancel", "--signal=KILL", "--full", "--state=RUNNING"])


def _write_files(folder: Path) -> None:
    host, hosts = socket.gethostname(), Path("/etc/hosts").read_text()
    ports = dict(zip(("controller", *NODES), _free_ports(3), strict=True))
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, **ports))
    (folder / "hosts").write_text(f"{hosts}\n127.0.0.1 {' '.join(NODES)}\n")
    gpus = [folder / f"gpu{number}" for number in range(8)]
    for path in gpus:
        path.touch()
    lines = [f"NodeName={name} Name=gpu File={folder}/gpu[0-7]\n" for name in NODES]
    (folder / "gres.conf").write_text("".join(lines))
    for name in ("state", "munge", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o711)
    key = folder / "munge" / "key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(1024))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _await(ready: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > end:
            logs = [path.read_text()[-3000:] for path in (*folder.glob("*.log"), *folder.glob("munge/log"))]
            raise AssertionError("SLURM does not start:\n" + "\n".join(logs))
        time.sleep(0.1)


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
