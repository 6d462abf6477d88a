"""The judgement of each check of the doctor, with small real inputs: full disks, low limits, wrong versions."""

import resource
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from packaging.requirements import Requirement

from rlhf.cli.doctor import lines
from rlhf.config import TrainerConfig
from rlhf.config.schema.env import EnvConfig
from rlhf.config.schema.reward import RewardConfig
from rlhf.diagnosis import collective_test, disk_checks
from rlhf.diagnosis.check_result import CheckResult, Outcome, ok, run_checks
from rlhf.diagnosis.cluster_checks import clock_outcomes, node_names, version_differences
from rlhf.diagnosis.collective_test import RankProgress, outcomes, partners, slow_pairs
from rlhf.diagnosis.confinement_check import check_confinement, confinements
from rlhf.diagnosis.disk_checks import check_disk, room_problems
from rlhf.diagnosis.gpu_checks import check_devices, driver_problems, driver_version, gpu_problems, torch_version_file
from rlhf.diagnosis.memory_checks import available_memory, host_problems, memory_limit, open_files_outcome
from rlhf.diagnosis.remote_check import check_remote
from rlhf.diagnosis.store_transport import StoreTransport
from rlhf.diagnosis.version_checks import check_versions, version_problems
from rlhf.errors import UserError
from rlhf.planning import devices
from rlhf.planning.checkpoint_size import CheckpointSize
from rlhf.ranks.transport import LostPeer
from tests.support.checkpoints import make_config
from tests.support.refusals import says
from tests.support.small_disks import small_disk

GIB = 1 << 30


def only(found) -> Outcome:
    (outcome,) = found
    return outcome


def size_of(count: int, max_to_keep: int | None = 3) -> CheckpointSize:
    return CheckpointSize({"actor/model": count}, 0, max_to_keep)


def test_each_check_has_a_line_and_a_late_or_broken_one_an_error():
    never = threading.Event()

    def breaks():
        raise UserError("trainer.x=1: wrong.\nSet it to 2.")

    checks = {"good": lambda: [ok("fine")], "late": lambda: [ok(str(never.wait()))], "breaks": breaks}
    found = run_checks(checks, "n1", 1.0)
    assert found[0] == CheckResult("ok", "good", "fine", "n1")
    assert [each.level for each in found] == ["ok", "error", "error"]
    says(found[1].text, "1 s", "dmesg")
    assert found[2].text == "trainer.x=1: wrong. Set it to 2."
    never.set()


def test_several_nodes_have_one_line_for_what_is_fine_and_one_for_each_problem():
    results = [CheckResult("ok", "disk", "fast", node) for node in "abc"]
    results += [CheckResult("error", "disk", "full. Free space.", "d"), CheckResult("ok", "clocks", "equal", "all")]
    assert list(lines(results)) == [
        "error    disk    d: full. Free space.",
        "ok       disk    a: fast (and on 2 more nodes)",
        "ok       clocks  equal",
    ]


@pytest.mark.parametrize(
    ("requirement", "level"),
    [
        ("torch>=99", "error"),
        ("torch>=2", None),
        ("absent>=1", "error"),
        ("absent>=1; extra == 's3'", "error"),
        ("absent>=1; extra == 'mlflow'", None),
        ("torch>=99; extra == 'mlflow'", "warning"),
        ("torch>=99; extra == 'dev'", None),
        ("vllm>=99; extra == 'vllm'", None),
    ],
)
def test_versions_are_judged_by_bounds_and_use(requirement, level):
    found = list(version_problems([Requirement(requirement)], {"torch": "2.13.0+cpu"}, {"s3"}))
    assert [each.level for each in found] == ([] if level is None else [level])
    if found:
        says(found[0].text, "pip install", requirement.partition(";")[0])


def test_this_installation_is_as_our_metadata_wants_it():
    assert only(check_versions({"fsdp2"})).level == "ok"
    assert only(check_versions({"gcs"})).text.startswith("gcsfs is not installed")


def test_a_full_disk_is_an_error_and_a_small_one_a_warning(tmp_path):
    with small_disk(tmp_path / "disk", 40) as disk:
        run_dir = disk / "rlhf" / "run"
        assert only(check_disk(run_dir, size_of(1 << 20), 1.0, 3600)).level == "ok"
        says(only(check_disk(run_dir, size_of(15 << 20), 1.0, 3600)).text, "3 checkpoints", "60 MiB", "max_to_keep")
        found = only(check_disk(run_dir, size_of(80 << 20), 1.0, 3600))
        assert found.level == "error"
        says(found.text, "40 MiB free", "80 MiB", "trainer.default_local_dir")
        assert only(check_disk(run_dir, size_of(80 << 20), 0.125, 3600)).level == "ok", "this node's part"
        (disk / "filler").write_bytes(bytes(38 << 20))
        full = only(check_disk(run_dir, None, 1.0, 3600))
        assert full.level == "error"
        says(full.text, "No space left", "trainer.default_local_dir")
        assert [path.name for path in disk.iterdir()] == ["filler"], "nothing is left behind"


def test_room_counts_the_checkpoints_that_retention_removes(tmp_path):
    size = size_of(10 << 20, max_to_keep=2)
    kinds = {(5, 0): "error", (5, 2): "warning", (35, 0): None, (15, 0): "warning", (15, 2): None}
    for (free, count), level in kinds.items():
        found = list(room_problems(tmp_path, size, 1.0, free << 20, count, count * (10 << 20)))
        assert [each.level for each in found] == ([level] if level else []), (free, count)


def test_a_file_in_the_place_of_the_run_directory(tmp_path):
    (tmp_path / "runs").write_text("")
    found = only(check_disk(tmp_path / "runs" / "mine", None, 1.0, 3600))
    assert found.level == "error"
    says(found.text, str(tmp_path / "runs"), "is a file", "trainer.default_local_dir")


def test_a_slow_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_checks, "measure", lambda path: (1e6, 0.01))
    found = only(check_disk(tmp_path, size_of(7200 * 10**6), 1.0, 3600))
    says(found.text, "1.0 MB/s", "7,200 s", "checkpoint.timeout_s=3600")
    monkeypatch.setattr(disk_checks, "measure", lambda path: (1e9, 3.0))
    assert only(check_disk(tmp_path, size_of(1), 1.0, 3600)).level == "warning"


def test_a_low_limit_of_open_files():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from rlhf.diagnosis.memory_checks import check_open_files; print(*check_open_files())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    says(shown, "level='error'", "200 open files", "ulimit -Hn")
    assert [open_files_outcome(limit).level for limit in (2048, 65536, resource.RLIM_INFINITY)] == [
        "warning",
        "ok",
        "ok",
    ]


def test_host_memory():
    assert memory_limit() >= available_memory() > 0
    assert only(host_problems(5 * GIB, 4 * GIB, 3 * GIB)).level == "error"
    assert only(host_problems(3 * GIB, 4 * GIB, 2 * GIB)).level == "warning"
    assert list(host_problems(GIB, 4 * GIB, 2 * GIB)) == []


def test_ranks_and_devices(tmp_path, monkeypatch):
    def check(nproc: int, device: str = "auto", servers: int = 0):
        return list(check_devices(TrainerConfig(nproc=nproc, device=device), servers, own_gpu=False, running=False))

    assert only(check(1000, "cpu")).level == "warning"
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in *ecc*) echo '0, GPU-a, 81559, H100, 12, 0\n1, GPU-b, 81559, H100, 9000, 3' ;; "
        "*) echo '0, GPU-a, 81559\n1, GPU-b, 81559' ;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(devices, "DRIVERS", ("/dev/null",))
    monkeypatch.setattr(devices, "version", lambda _: "2.13.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    busy, broken = "GPU 1 (H100) has 8.8 GiB in use", "GPU 1 (H100) has 3 uncorrected memory errors"
    texts = [each.text for each in check(2)]
    assert [text.startswith(start) for text, start in zip(texts, (broken, busy), strict=True)] == [True, True]
    says(check(3)[0].text, "trainer.nproc=3", "2 CUDA devices", "trainer.nproc=2")
    says(check(2, servers=1)[0].text, "3 GPUs", "trainer.nproc=1")
    assert list(gpu_problems([["1", "A", "[N/A]", "[N/A]"]], busy=True)) == []
    program.write_text(program.read_text().replace("9000, 3", "9, 0"))
    assert only(check(2)).text == "2 GPUs visible (H100) for 2 ranks"


@pytest.mark.parametrize(
    ("device", "driver", "cuda", "level"),
    [
        ("auto", 13000, "13.0", None),
        ("auto", 13000, "12.8", None),
        ("auto", 12040, "12.8", None),
        ("auto", 12080, "13.0", "error"),
        ("auto", 12080, None, "warning"),
        ("cuda", 12080, None, "error"),
        ("cpu", 12080, "13.0", None),
        ("cuda", None, "13.0", None),
    ],
)
def test_the_driver_against_torchs_cuda(monkeypatch, device, driver, cuda, level):
    monkeypatch.setattr(devices, "DRIVERS", ("/dev/null",))
    torch = SimpleNamespace(__version__="2.13.0", cuda=cuda)
    found = list(driver_problems(device, driver, torch))
    assert [each.level for each in found] == ([] if level is None else [level])


def test_torchs_versions_are_read_without_its_import():
    import torch

    found = torch_version_file()
    assert (found.__version__, found.cuda) == (torch.__version__, torch.version.cuda)
    assert driver_version() is None or torch.cuda.is_available() or driver_version() >= 10000


def test_the_remote_folder(tmp_path):
    config = make_config(tmp_path)
    config.checkpoint.remote = f"file://{tmp_path}/remote"
    assert only(check_remote(config.run_dir, config.trainer, config.checkpoint)).level == "ok"
    (tmp_path / "file").write_text("")
    config.checkpoint.remote = f"file://{tmp_path}/file"
    with pytest.raises(UserError, match=r"checkpoint\.remote=file://.*cannot be written"):
        list(check_remote(config.run_dir, config.trainer, config.checkpoint))


def test_confinement_is_tried_for_what_the_run_starts(tmp_path):
    plain, env = RewardConfig(functions=["exact_match"]), EnvConfig()
    assert only(check_confinement(confinements(plain, env))).text == "no process of the run needs confinement"
    kinds = confinements(RewardConfig(functions=["math_verify"]), EnvConfig(command="agent"))
    assert [kind.loopback for kind in kinds] == [False, True]
    found = only(check_confinement(kinds[:1]))
    assert found.level in ("ok", "warning"), found.text


def test_clocks_of_nodes():
    assert only(clock_outcomes({"a": 0.0, "b": 1.5}, 0.1)).text == "within 1.6 s of each other"
    assert [each.level for each in clock_outcomes({"a": 0.0, "b": -4.0, "c": 900.0}, 0.1)] == ["warning", "error"]
    assert only(clock_outcomes({"a": 0.0, "b": 4.0}, 3.0)).level == "ok", "a slow answer is no wrong clock"


def test_versions_of_nodes():
    same = {"torch": "2.13.0", "transformers": "5.24.0"}
    assert only(version_differences({"a": same, "b": same})).level == "ok"
    found = only(version_differences({"a": same, "b": same | {"torch": "2.12.0"}, "c": same}))
    assert found.level == "error"
    says(found.text, "torch", "2.13.0 on a, c", "2.12.0 on b")


def test_names_of_nodes():
    assert node_names([("m1", "a"), ("m1", "a"), ("m2", "b")]) == ["a", "a", "b"]
    assert node_names([("m1", "a"), ("m2", "a"), ("m2", "a")]) == ["a (rank 0)", "a (rank 1)", "a (rank 1)"]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_each_pair_meets_once_and_both_agree_on_the_round(count):
    members = [2 * i for i in range(count)]
    found = {rank: list(partners(members, rank)) for rank in members}
    assert all(sorted(found[rank]) == [other for other in members if other != rank] for rank in members)
    # Each rank works through its partners in order; nobody may wait for a partner that waits for somebody else.
    position, met = dict.fromkeys(members, 0), 0
    while met < count * (count - 1) // 2:
        ready = [
            (a, b)
            for a in members
            for b in found[a][position[a] : position[a] + 1]
            if a < b and found[b][position[b]] == a
        ]
        assert ready, "a deadlock"
        for a, b in ready:
            position[a], position[b], met = position[a] + 1, position[b] + 1, met + 1


def test_the_ranks_that_fail_or_hang_are_named():
    ranks = [RankProgress("all-reduce"), RankProgress("all-reduce", problem="LostPeer: gone"), RankProgress("starting")]
    text = only(outcomes(ranks)).text
    says(text, "rank 1 failed in all-reduce: LostPeer: gone", "rank 0 hangs in all-reduce", "rank 2 hangs in starting")


def test_a_wrong_sum_and_slow_pairs():
    right = RankProgress("", done=True, device="cpu", total=3.0, all_reduce=1e9, pairs={"0-1": 2e9})
    assert only(outcomes([right, RankProgress("", done=True, device="cpu", total=3.0, all_reduce=2e9)])).level == "ok"
    assert only(outcomes([right, RankProgress("", done=True, device="cpu", total=2.0)])).text.endswith(
        f"on rank 1. Replace this GPU or its node. {collective_test.REMEDY}"
    )
    says(only(slow_pairs({"0-1": 9e9, "0-2": 1e9, "1-2": 8e9})).text, "0-2 1 GB/s", "median is 8 GB/s")


def test_a_rank_that_never_comes_is_named_on_every_rank():
    store, found = dist.HashStore(), {}

    def rank(number: int) -> None:
        try:
            transport = StoreTransport(store, number, 4, 2.0)
            transport.all_gather(number)
        except LostPeer as lost:
            found[number] = str(lost)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys((0, 2), "ranks 1, 3 did not answer within 2 s")
