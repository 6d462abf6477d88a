"""Ranks of one machine listen on its loopback interface; two ranks on one GPU are an error."""

import os
import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhf.errors import EXIT_DONE
from rlhf.ranks import machines
from tests.support.forked_start import train_forked
from tests.support.launching import ranks, small
from tests.support.refusals import says

LISTENING = "0A"
SEEN = "RLHF_TEST_SEEN"


def note_sockets(event: str) -> None:
    """Write the number of local ranks, gloo's interface and the listening addresses of this process into a file."""
    if event != "update.before":
        return
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(fd.readlink().name)
        except OSError:
            continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes:
                found.append(address_of(fields[1].partition(":")[0]))
    # If the machine's name resolves to 127.0.0.1, gloo always listens there. Otherwise the interface decides.
    text = " ".join([os.environ["LOCAL_WORLD_SIZE"], os.environ.get(machines.GLOO_INTERFACE, "none"), *found])
    (Path(os.environ[SEEN]) / os.environ["RANK"]).write_text(text)


def address_of(digits: str) -> str:
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def seen(folder: Path) -> dict[int, list[str]]:
    texts = {int(path.name): path.read_text().split() for path in folder.iterdir()}
    return {rank: [local, gloo, *sorted(set(addresses))] for rank, (local, gloo, *addresses) in texts.items()}


@pytest.fixture
def environment(tmp_path, monkeypatch) -> dict[str, str]:
    for variable in (machines.GLOO_INTERFACE, machines.NCCL_INTERFACE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "seen").mkdir()
    return {"RLHF_EVENT_LISTENER": "tests.integration.test_ranks_network:note_sockets", SEEN: str(tmp_path / "seen")}


def test_ranks_under_the_supervisor_listen_on_the_loopback_address(tmp_path, sums, environment):
    command = [*small(tmp_path, "local", sums), "trainer.nproc=2", "trainer.total_training_steps=1"]
    end = train_forked([*command, "actor.optim.lr_warmup_steps=0"], environment)
    assert end.code == EXIT_DONE, end.output
    assert seen(tmp_path / "seen") == {rank: ["2", "lo", "127.0.0.1"] for rank in (0, 1)}


def test_ranks_of_another_launcher_count_themselves(tmp_path, sums, environment):
    """srun starts ranks without LOCAL_WORLD_SIZE. The store of rank 0 is torch's, and listens on every address."""
    command = [*small(tmp_path, "srun", sums), "trainer.total_training_steps=1", "actor.optim.lr_warmup_steps=0"]
    end = ranks(tmp_path / "log", command, environment, nproc=2)
    assert end.code == EXIT_DONE, end.output
    assert seen(tmp_path / "seen") == {0: ["2", "lo", "127.0.0.1", "::"], 1: ["2", "lo", "127.0.0.1"]}


class Settled(threading.Thread):
    """Calls `settle_places` for one rank."""

    def __init__(self, store: dist.Store, rank: int, gpu: str) -> None:
        super().__init__()
        self._arguments, self.error = (store, rank, 2, gpu), ""

    def run(self) -> None:
        try:
            machines.settle_places(*self._arguments, remote_servers=False)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("gpus", "shared"), [(["GPU-a", "GPU-a"], True), (["GPU-a", "GPU-b"], False), (["", ""], False)]
)
def test_two_ranks_on_one_gpu_are_an_error_of_the_user(monkeypatch, gpus, shared):
    """NCCL's own error was "Duplicate GPU detected", without a remedy."""
    for variable in (machines.GLOO_INTERFACE, machines.NCCL_INTERFACE, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "1")  # so that the present value is restored at the end
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = [Settled(store.clone(), rank, gpu) for rank, gpu in enumerate(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in threads:
        if shared:
            says(
                thread.error,
                "UserError",
                "trainer.device=cuda",
                "0, 1",
                "GPU-a",
                "--nproc-per-node",
                "trainer.device=cpu",
            )
        else:
            assert thread.error == ""


@pytest.mark.parametrize("remote_servers", [False, True])
def test_settings_of_the_user_and_remote_servers_keep_their_network(monkeypatch, remote_servers):
    monkeypatch.setenv(machines.GLOO_INTERFACE, "eth7")
    monkeypatch.setenv(machines.NCCL_INTERFACE, "")
    monkeypatch.delenv(machines.NCCL_INTERFACE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    machines.settle_places(store, 0, 1, "", remote_servers=remote_servers)
    assert (os.environ[machines.GLOO_INTERFACE], os.environ["LOCAL_WORLD_SIZE"]) == ("eth7", "8")
    assert os.environ.get(machines.NCCL_INTERFACE) == (None if remote_servers else "lo")
