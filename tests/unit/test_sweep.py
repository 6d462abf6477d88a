"""Sweeps: combinations, names and directories of runs, and that a failed run does not stop the other runs."""

import errno
import os
import signal

import pytest

from rlhf.cli.sweep import LONGEST_NAME, plan, run_all, run_name
from rlhf.compose import combinations, compose_config
from rlhf.config.library import Library
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, UserError
from rlhf.launch.stop_request import StopRequest

LIBRARY = Library.find(None)


def test_combinations_follow_hydras_sweep_syntax():
    found = combinations(["a=1,2", "b=[3,4]", "c=range(1,3)", "+d='x,y'", "e=choice(u,v)"])
    assert len(found) == 8
    assert found[0].overrides == ["a=1", "b=[3,4]", "c=1", "+d='x,y'", "e=u"]
    assert found[0].swept == ("a=1", "c=1", "e=u")
    assert [f.swept[-1] for f in found[:2]] == ["e=u", "e=v"]


@pytest.mark.parametrize("wrong", ["a=interval(0,1)", "a=glob(*)"])
def test_a_sweep_without_a_list_is_refused(wrong):
    with pytest.raises(UserError, match="-m takes lists of values"):
        combinations([wrong])


def test_each_run_has_a_directory_named_by_its_values():
    runs = plan(["actor.optim.lr=1e-5,5e-5", "algorithm=grpo,rloo", "trainer.seed=3"], LIBRARY)
    assert [run.config.run_dir.name for run in runs] == [
        f"offline-actor.optim.lr-{lr}-algorithm-{algorithm}"
        for lr in ("1e-05", "5e-05")
        for algorithm in ("grpo", "rloo")
    ]
    assert [run.config.actor.optim.lr for run in runs] == [1e-5, 1e-5, 5e-5, 5e-5]
    assert {run.config.trainer.seed for run in runs} == {3}


def test_experiments_that_are_swept_name_themselves():
    runs = plan(["trainer.experiment_name=a,b", "trainer.project_name=${trainer.experiment_name}"], LIBRARY)
    assert [run.config.trainer.experiment_name for run in runs] == ["a", "b"]


def test_names_are_plain_and_differ_where_values_do():
    assert run_name("e", ["data.train_files=a.jsonl", "trainer.seed=1"]) == "e-data.train_files-a.jsonl-trainer.seed-1"
    one, other = (run_name("e", [f"data.train_files=a{c}b"]) for c in "/:")
    assert one != other
    assert one.startswith("e-data.train_files-a_b-")
    assert len(run_name("e", ["data.train_files=" + "x" * 300])) < LONGEST_NAME + 20


KEY = "ZQKEY7777777"


@pytest.mark.parametrize(
    ("swept", "masks"),
    [
        (f"reward.kwargs={{api_key: {KEY}, w: 1}},{{api_key: {KEY}, w: 2}}", ["w:1", "w:2"]),
        (f"reward.kwargs.api_key={KEY},{KEY}8", ["api_key=REDACTED-1", "api_key=REDACTED-2"]),
        (f"reward.kwargs.headers=['Authorization: Bearer {KEY}'],[a]", ["headers=[REDACTED-1]", "headers=[a]"]),
        (
            f"tracking={{alerts: {{command: [a, 'Bearer {KEY}']}}}},{{alerts: {{webhook: {KEY}}}}}",
            ["command:[a,REDACTED-1]", "webhook:REDACTED-2"],
        ),
        (
            f"tracking.alerts.webhook='http://h/a?key={KEY}','http://u:{KEY}@h'",
            ["webhook=REDACTED-1", "webhook=REDACTED-2"],
        ),
        (f'reward.kwargs.api_key="{KEY} it\\"s",b', ["REDACTED-1", "REDACTED-2"]),
    ],
)
def test_secrets_of_a_sweep_are_stored_nowhere(swept, masks):
    runs = plan([swept, "trainer.seed=1,2"], LIBRARY)
    assert len({run.config.run_dir for run in runs}) == 4
    for run, mask in zip(runs[::2], masks, strict=True):
        for text in (to_yaml(run.config), str(run), str(run.config.run_dir), repr(run.config)):
            assert KEY not in text
        assert mask in str(run)
    again = plan([swept, "trainer.seed=1,2"], LIBRARY)
    assert [run.config.run_dir for run in again] == [run.config.run_dir for run in runs]
    alone = compose_config(list(runs[0].overrides), LIBRARY)
    assert (alone.run_dir, alone.reward.kwargs) == (runs[0].config.run_dir, runs[0].config.reward.kwargs)


def test_a_new_secret_keeps_sweep_directories_and_equal_secrets_are_an_error():
    first, second = (plan([f"reward.kwargs.api_key={key}a,{key}b"], LIBRARY) for key in ("old", "new"))
    assert [run.config.run_dir.name for run in first] == [
        "offline-reward.kwargs.api_key-REDACTED-1",
        "offline-reward.kwargs.api_key-REDACTED-2",
    ]
    assert [run.config.run_dir for run in first] == [run.config.run_dir for run in second]
    with pytest.raises(UserError, match="two runs of the sweep are the same"):
        plan(["reward.kwargs.api_key=a,a"], LIBRARY)


def test_interpolations_of_a_sweep_keep_their_text(monkeypatch):
    monkeypatch.setenv("JUDGE_A", KEY)
    monkeypatch.setenv("JUDGE_B", KEY)
    runs = plan(["reward.kwargs.api_key='${oc.env:JUDGE_A}','${oc.env:JUDGE_B}'"], LIBRARY)
    assert [run.config.reward.kwargs["api_key"] for run in runs] == [KEY, KEY]
    assert KEY not in "".join(f"{run} {run.config.run_dir}" for run in runs)
    assert "JUDGE_B" in str(runs[1])


def test_mistakes_of_all_runs_are_reported_before_the_first_run_starts():
    with pytest.raises(UserError) as raised:
        plan(["rollout.n=1,4,0", "trainer.nproq=2"], LIBRARY)
    assert str(raised.value).splitlines() == [
        "trainer.nproq=2: there is no setting trainer.nproq. Did you mean trainer.nproc?"
    ]
    with pytest.raises(UserError) as raised:
        plan(["rollout.n=1,4,0"], LIBRARY)
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == ["rollout.n=1", "rollout.n=0"]
    with pytest.raises(UserError, match="two runs of the sweep are the same"):
        plan(["trainer.seed=1,1"], LIBRARY)


def test_under_torchrun_there_is_no_sweep(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="a command under torchrun is a single run"):
        plan(["trainer.seed=1,2"], LIBRARY)


@pytest.mark.parametrize(("signalled", "code"), [(1, EXIT_REQUEUE), (2, EXIT_REQUEUE), (3, EXIT_DONE)])
def test_a_signal_in_the_last_step_of_a_run_stops_the_sweep(signalled, code):
    """The run finishes with exit code 0; the sweep went on with the next run until a scheduler killed it."""
    seen = []

    def start(config):
        with StopRequest():
            if len(seen) + 1 == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
        seen.append(config.trainer.seed)
        return EXIT_DONE

    assert run_all(plan(["trainer.seed=1,2,3"], LIBRARY), start) == code
    assert seen == [1, 2, 3][:signalled]


@pytest.mark.parametrize(
    ("codes", "started", "code"),
    [
        ([EXIT_DONE, EXIT_DONE, EXIT_DONE], 3, EXIT_DONE),
        ([EXIT_DONE, EXIT_CRASHED, EXIT_DONE], 3, EXIT_CRASHED),
        ([None, EXIT_DONE, EXIT_DONE], 3, EXIT_USER_ERROR),
        ([None, EXIT_DONE, EXIT_CRASHED], 3, EXIT_CRASHED),
        ([EXIT_CRASHED, EXIT_REQUEUE, EXIT_DONE], 2, EXIT_REQUEUE),
    ],
)
def test_a_failed_run_does_not_stop_the_other_runs(codes, started, code, capsys):
    runs, seen = plan(["trainer.seed=1,2,3"], LIBRARY), []

    def start(config):
        seen.append(config.trainer.seed)
        if (end := codes[len(seen) - 1]) is None:
            raise UserError("a mistake")
        if end == EXIT_CRASHED and len(seen) == 2:
            raise OSError(errno.ESTALE, "a network disk")
        return end

    assert run_all(runs, start) == code
    assert seen == [1, 2, 3][:started]
    output = capsys.readouterr().err
    rows = output.partition("Results of the sweep:\n")[2].splitlines()[1:4]
    states = {EXIT_DONE: "finished", EXIT_CRASHED: "failed (1)", EXIT_REQUEUE: "stopped", None: "failed (2)"}
    expected = [states[end] for end in codes[:started]] + ["not started"] * (3 - started)
    assert [row.partition(" ")[0] for row in rows] == ["trainer.seed=1", "trainer.seed=2", "trainer.seed=3"]
    assert [row.rpartition("  ")[2] for row in rows] == expected
    failed = [line for line in output.splitlines() if "Failed with exit code" in line]
    if code != EXIT_REQUEUE:
        wrong = [f"trainer.seed={n}" for n, c in enumerate(codes, 1) if c != EXIT_DONE]
        assert [line.rpartition(", in ")[0].rpartition(": ")[2] for line in failed] == wrong
