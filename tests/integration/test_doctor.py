"""python -m rlhf.doctor as users start it: alone, and as two ranks of torchrun."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from rlhf.diagnosis.local_ranks import check_collectives
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_USER_ERROR
from tests.support.refusals import says

DEADLINE_S = 240
NODE = ["plan", "devices", "versions", "host memory", "shared memory", "open files", "disk", "remote", "confinement"]
CPU = "trainer.device=cpu"


def doctor(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "rlhf.doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def test_alone(tmp_path):
    where = f"trainer.default_local_dir={tmp_path}/new/runs"
    done = doctor(CPU, where)
    assert done.returncode == EXIT_DONE, done.stderr + done.stdout
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert [text.startswith(name) for name, (_, text) in zip([*NODE, "collectives"], rows, strict=True)] == [True] * 10
    assert {level for level, _ in rows} <= {"ok", "warning"}, done.stdout
    says(rows[-1][1], "2 ranks, gloo on CPUs", "GB/s")
    assert list(tmp_path.iterdir()) == [], "the doctor creates no run directory"


def test_as_two_ranks_of_torchrun(tmp_path):
    (tmp_path / "file").write_text("")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = doctor(CPU, f"checkpoint.remote=file://{tmp_path}/file", "--json", launcher=torchrun)
    assert done.returncode == EXIT_CRASHED, done.stderr
    found = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
    assert list(found) == [*NODE, "nodes", "collectives"], "one rank checks the node for both"
    assert [name for name, each in found.items() if each["level"] == "error"] == ["remote"]
    says(found["remote"]["text"], "checkpoint.remote=file://", "checkpoint.remote=null")
    assert found["nodes"]["text"] == "2 ranks on 1 node"
    says(found["collectives"]["text"], "2 ranks, gloo on CPUs", "each pair")


def test_a_mistake_in_the_settings_is_one_message():
    done = doctor("trainer.nprok=2")
    assert done.returncode == EXIT_USER_ERROR
    says(done.stderr, "trainer.nprok", "trainer.nproc")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_ranks_that_fail_are_named():
    (found,) = check_collectives("cuda", DEADLINE_S)
    assert found.level == "error"
    says(found.text, "rank 0 failed in starting", "rank 1 failed in starting")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_two_nodes(tmp_path, shared):
    """Two process-id namespaces count as two nodes, which share a folder or not."""
    isolated = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to create process-id namespaces")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launch |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0"}
    nodes = []
    for rank in range(2):
        folder = tmp_path / ("both" if shared else f"node_{rank}")
        folder.mkdir(exist_ok=True)
        command = [*isolated, sys.executable, "-m", "rlhf.doctor", CPU, f"trainer.default_local_dir={folder}", "--json"]
        nodes.append(
            subprocess.Popen(command, env=os.environ | launch | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        )
    answers = [node.communicate(timeout=DEADLINE_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [EXIT_DONE, EXIT_DONE], answers
    assert answers[1] == "", "the first rank prints for all"
    found = json.loads(answers[0])["checks"]
    texts = {each["check"]: each["text"] for each in found}
    assert sum(each["check"] == "disk" for each in found) == 2, "each node has its own checks"
    assert len({each["node"] for each in found}) == 3
    assert texts["nodes"] == "2 ranks on 2 nodes"
    assert {"equal versions", "clocks", "collectives"} <= texts.keys()
    says(texts["shared disk"], *(["all nodes share", "with locks"] if shared else ["2 separate disks"]))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
