"""The parts of launcher=ray that need no Ray: checks of settings, ends of ranks, and which ends restart the run."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.api import start
from rlhf.cli.submission import checked_elsewhere, checked_runs
from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.config.rules import launcher_rules
from rlhf.config.rules.launcher_rules import missing_ray
from rlhf.config.rules.validate import validate
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.launch.ray import node
from rlhf.launch.ray.endings import Endings, RanksEnded, RunEnds, code_of
from rlhf.launch.ray.growth import LASTING_S, WAIT_S, Growth
from rlhf.planning.device_defaults import Machine
from tests.support.launching import ROOT
from tests.support.refusals import says, user_error

FOLDER = Path(__file__).parent
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2"}


def config(*words: str) -> Config:
    return compose_config(list(words), Library.find(None))


@pytest.mark.parametrize(
    ("words", "environ", "facts"),
    [
        (["launcher=ray"], TORCHRUN, ["launcher.name=ray", "torchrun"]),
        (["launcher=ray", "launcher.min_nodes=3", "trainer.nnodes=2"], {}, ["launcher.min_nodes=3", "trainer.nnodes"]),
        (["launcher.min_nodes=1"], {}, ["launcher.min_nodes=1", "launcher=ray"]),
        (["launcher.address=h:1"], {}, ["launcher.address", "launcher=ray"]),
        (["launcher.start_timeout_s=9"], {}, ["launcher.start_timeout_s", "launcher=ray"]),
        (
            ["launcher=ray", f"trainer.callbacks=[{FOLDER / 'follow.py'}:follow]"],
            {},
            ["trainer.callbacks"],
        ),
        (
            ["launcher=ray", "trainer.nnodes=4", "launcher.min_nodes=2", "backend.dp_replicate=4"],
            {},
            ["backend.dp_replicate=4", "launcher.min_nodes=2", "set backend.dp_replicate=2"],
        ),
    ],
)
def test_settings_that_ray_cannot_use_are_rejected_before_ray_starts(words, environ, facts):
    def check() -> None:
        validate(config(*words), environ, here=False)

    says(user_error(check), *facts)


def test_fewer_machines_must_not_divide_what_may_not_shrink():
    validate(config("launcher=ray", "trainer.nnodes=4", "backend.dp_replicate=4"), {}, here=False)
    validate(config("launcher=ray", "trainer.nnodes=4", "launcher.min_nodes=2"), {}, here=False)


def test_without_ray_one_message_has_the_command(monkeypatch):
    assert list(missing_ray(config())) == []
    monkeypatch.setattr(launcher_rules, "LEAST_RAY", "999")
    [problem] = missing_ray(config("launcher=ray"))
    says(problem, "launcher.name=ray", "ray", "pip install 'rlhf[ray]'", "launcher=local")


def test_callbacks_from_python_have_no_supervisor():
    says(user_error(lambda: start(config("launcher=ray"), [], [print])), "callbacks", "launcher=ray")


def test_another_scheduler_and_ray_do_not_both_launch(monkeypatch):
    monkeypatch.setattr("rlhf.config.rules.validate.missing_ray", lambda config: [])  # as where Ray is installed
    machine = Machine(0, None)
    for check in (
        lambda: checked_runs(["launcher=ray"], None, machine),
        lambda: checked_elsewhere(["launcher=ray"], None, machine, ""),
    ):
        says(user_error(check), "launcher.name=ray", "scheduler", "Remove")


@pytest.mark.parametrize(
    ("codes", "stopped", "code"),
    [
        ([0, 0], False, EXIT_DONE),
        ([0, 0], True, EXIT_DONE),
        ([0], False, EXIT_CRASHED),
        ([1, 2], False, EXIT_USER_ERROR),
        ([-9], False, EXIT_CRASHED),
        ([75, 75], False, EXIT_REQUEUE),
        ([75, 1], False, EXIT_REQUEUE),
        ([], True, EXIT_REQUEUE),
    ],
)
def test_the_ranks_of_a_machine_have_one_exit_code(codes, stopped, code):
    assert code_of(codes, 2, stopped=stopped) == code


def crash(step: int | None = 4) -> RanksEnded:
    return RanksEnded(EXIT_CRASHED, step, False, "rank 1 died with SIGKILL")


def test_a_mistake_ends_the_run_whatever_its_peers_died_of(tmp_path):
    mistake = RanksEnded(EXIT_USER_ERROR, None, False, "data.train_files=x")
    with pytest.raises(RunEnds) as raised:
        Endings(TrainerConfig(), tmp_path).after([crash(), mistake])
    assert (raised.value.code, raised.value.message) == (EXIT_USER_ERROR, "data.train_files=x")


def test_a_saved_run_ends_unless_its_machines_change(tmp_path):
    endings = Endings(TrainerConfig(max_restarts=0), tmp_path)
    leaves, left = RanksEnded(EXIT_REQUEUE, 4, True, "leaves"), RanksEnded(EXIT_REQUEUE, 4, False, "left")
    assert endings.after([leaves]) == endings.after([left, leaves]) == 0
    with pytest.raises(RunEnds) as raised:
        endings.after([RanksEnded(EXIT_REQUEUE, 4, False, "left")])
    assert raised.value.code == EXIT_REQUEUE


def test_crashes_use_up_the_supervisors_budget(tmp_path):
    endings = Endings(TrainerConfig(max_failures_per_step=3, restart_backoff_s=0.5), tmp_path)
    assert [endings.after([crash(4)]), endings.after([crash(4)])] == [0.5, 5.0]
    with pytest.raises(RunEnds, match="max_failures_per_step=3"):
        endings.after([crash(4)])


def test_a_lost_machine_counts_by_the_newest_checkpoint(tmp_path):
    endings = Endings(TrainerConfig(max_failures_per_step=2), tmp_path)
    for step in (3, 6, 9):
        (tmp_path / f"global_step_{step}").mkdir()
        endings.after([RuntimeError(f"actor {step} died")])
    # Ray reports the same failure each time it looks.
    assert [endings.after([RuntimeError("actor 9 died")]) for _ in range(5)] == [0.0] * 5
    with pytest.raises(RunEnds, match="at step 9"):
        endings.after([RuntimeError("actor 10 died")])


def test_the_ends_reach_the_driver_through_pickle():
    end = pickle.loads(pickle.dumps(RanksEnded(EXIT_REQUEUE, 4, True, "left")))
    assert (end.code, end.step, end.continues, str(end)) == (EXIT_REQUEUE, 4, True, "left")
    ends = pickle.loads(pickle.dumps(RunEnds(EXIT_USER_ERROR, "wrong")))
    assert (ends.code, str(ends)) == (EXIT_USER_ERROR, "wrong")


class Notices:
    """Asks the ranks to leave at once, or never."""

    def __init__(self, leave: bool = False) -> None:
        self._leave = leave

    def look(self) -> bool:
        return self._leave


def ranks(*programs: str) -> dict[int, node.RankProcess]:
    made = {}
    for rank, program in enumerate(programs):
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
        made[rank] = node.RankProcess(process, process.stderr)
    return made


SLEEPS, LEAVES = "import time; time.sleep(60)", "import os; os._exit({})"
SAVES = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); time.sleep(60)"


def test_a_crash_waits_for_the_mistake_of_a_peer():
    made = ranks(LEAVES.format(1), "import os, time; time.sleep(1); os._exit(2)")
    assert node._wait(made, Notices(), 60) == {0: 1, 1: 2}


def test_the_message_of_a_mistake_is_what_the_rank_wrote_last(capfd):
    program = "import os, sys; sys.stderr.write('12:00:00 rank 0: error: data=x\\nSet data.\\n'); os._exit(2)"
    made = ranks(program, LEAVES.format(1))
    made[1].process.wait()
    codes = {0: made[0].process.wait(), 1: 1}
    assert node._message(EXIT_USER_ERROR, codes, made, {}, "") == "data=x\nSet data."
    assert "rank 0: error: data=x" in capfd.readouterr().err
    says(node._message(EXIT_CRASHED, {1: -9}, made, {}, ""), "rank 1 died with SIGKILL")


def test_a_killed_rank_is_found_while_its_peers_run():
    made = ranks(SLEEPS, "import os; os.kill(os.getpid(), 9)")
    assert node._wait(made, Notices(), 60) == {1: -signal.SIGKILL}
    node._signal(made, signal.SIGKILL)
    assert [each.process.wait() for each in made.values()] == [-signal.SIGKILL] * 2


def test_a_notice_lets_the_ranks_save_within_their_grace(monkeypatch):
    monkeypatch.setattr(node, "_LOOK_S", 1.0)  # the handler is installed before the first look
    late = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    made = ranks(SAVES, late)
    asked = iter([False])

    class Later(Notices):
        def look(self) -> bool:
            return next(asked, True)

    assert node._wait(made, Later(), 2.0) == {0: EXIT_REQUEUE}
    node._signal(made, signal.SIGKILL)
    assert made[1].process.wait() == -signal.SIGKILL


def test_a_machine_whose_ranks_ended_waits_for_the_others_within_their_grace(monkeypatch, tmp_path, capfd):
    release = threading.Event()
    collective = SimpleNamespace(broadcast_from_rank_zero=lambda own: own, barrier=lambda: release.wait(20))
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 2)
    train = SimpleNamespace(get_context=lambda: context, collective=collective)
    ray = SimpleNamespace(train=train, util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    for name, module in {"ray": ray, "ray.train": train, "ray.train.collective": collective}.items():
        monkeypatch.setitem(sys.modules, name, module)
    no_ranks = node.NodeJob("", (), 0, tmp_path, tmp_path, {}, 0.1, "", lambda attempt, machines: (False, False))
    began = time.monotonic()
    node.run_node(no_ranks)
    assert time.monotonic() - began < 15
    says(capfd.readouterr().err, "trainer.preempt_grace_s=0.1")
    release.set()
    node.run_node(no_ranks)
    assert capfd.readouterr().err == ""


class Cluster:
    """A cluster in virtual time, which has room for another machine or not."""

    def __init__(self, most: int) -> None:
        self.now, self.room = 0.0, False
        self.growth = Growth(most, lambda: self.room, lambda: self.now)

    def grows(self, attempt: str, machines: int, seconds: float) -> bool:
        """Let the workers of an attempt look every two seconds. Return whether its ranks must leave."""
        end = self.now + seconds
        while self.now < end:
            self.now += 2.0
            if self.growth.look(attempt, machines):
                return True
        return False


def test_ranks_leave_for_a_machine_that_has_had_room_for_a_minute():
    cluster = Cluster(2)
    assert not cluster.grows("a", 1, 600)
    cluster.room = True
    assert not cluster.grows("a", 1, WAIT_S - 10)
    cluster.room = False  # the machine comes and goes
    assert not cluster.grows("a", 1, 20)
    cluster.room = True
    assert not cluster.grows("a", 1, WAIT_S - 2)
    assert cluster.grows("a", 1, 30)
    assert cluster.growth.look("a", 1)  # each worker of the attempt gets the same answer
    assert not cluster.grows("b", 2, 600)


def test_growth_that_does_not_last_gets_rarer():
    cluster = Cluster(2)
    cluster.room = True

    def wait(attempt: str) -> float:
        began = cluster.now
        assert cluster.grows(attempt, 1, 10_000)
        return cluster.now - began

    first, second = wait("a"), wait("b")  # the restart found the room taken
    assert not cluster.grows("c", 2, 60)
    third = wait("d")  # the machine was lost again
    assert WAIT_S < first < second - WAIT_S / 2 < third - WAIT_S
    assert not cluster.grows("e", 1, 60)
    assert wait("f") == pytest.approx(2 * third, rel=0.1)
    assert not cluster.grows("g", 2, LASTING_S)
    assert wait("h") == first


@pytest.mark.parametrize("machines", [(3, 4), (1, 2, 3, 4)])
def test_a_growth_that_stays_below_the_largest_number_succeeds(machines):
    cluster = Cluster(5)
    cluster.room = True
    for attempt, number in enumerate(machines):
        began = cluster.now
        assert cluster.grows(str(attempt), number, 10_000)
        assert cluster.now - began < WAIT_S + 30


def test_a_growth_below_the_largest_number_fails_when_its_machine_is_lost():
    cluster = Cluster(3)
    cluster.room = True
    assert cluster.grows("a", 1, 10_000)
    cluster.room = False
    assert not cluster.grows("b", 2, 60)
    assert not cluster.grows("c", 2, 60)  # a crash does not judge the growth
    cluster.room = True
    assert not cluster.grows("d", 1, 1.5 * WAIT_S)
    assert cluster.grows("d", 1, WAIT_S)


def test_a_growth_that_lasts_an_hour_ends_the_long_waits():
    cluster = Cluster(3)
    cluster.room = True
    for attempt in "abc":  # each restart finds the room taken
        assert cluster.grows(attempt, 1, 10_000)
    cluster.room = False
    assert not cluster.grows("d", 2, LASTING_S)
    cluster.room = True
    assert cluster.grows("d", 2, WAIT_S + 30)


def test_a_rank_has_the_commands_environment_but_rays_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Ray sets it for one worker, not for two ranks
    given = {"HF_HOME": "/models", "CUDA_VISIBLE_DEVICES": "0", "PATH": os.environ["PATH"]}
    job = node.NodeJob("", (), 2, Path("run"), Path(), given, 1.0, "", lambda attempt, machines: (False, False))
    found = node._variables(job, 3, 4, ("10.0.0.1", 29500))
    assert (found["HF_HOME"], found["CUDA_VISIBLE_DEVICES"]) == ("/models", "4,5")
    assert "OMP_NUM_THREADS" not in found
    world = {name: found[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    assert world == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_the_commands_of_the_page_are_valid():
    page = (ROOT / "docs" / "clusters.md").read_text().partition("## Ray")[2]
    commands = re.findall(r"-m rlhf\.train ([^\n\"`]*launcher=ray[^\n\"`]*)", page)
    assert len(commands) == 2
    for command in commands:
        validate(config(*command.split()), {}, here=False)
