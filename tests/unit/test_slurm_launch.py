"""The batch script of a run, without SLURM: the resources that it requests, and mistakes that never reach SLURM."""

import subprocess
from pathlib import Path

import pytest

from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.launch.slurm.__main__ import main
from rlhf.launch.slurm.sbatch_options import gpus_of, seconds_of, sort_words
from tests.support.refusals import says

CPU = "trainer.device=cpu"


def script(capsys, *words: str) -> str:
    assert main([*words, "--dry-run"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    return text


def options(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}


def arguments(text: str, prelude: str = "") -> list[str]:
    """The arguments of rlhf.train and the run directory, as bash reads them from the script's assignments."""
    assigned = text.partition("\n\n")[2].partition("\njob=")[0]
    shown = f'{prelude}{assigned}\nprintf "%s\\n" "${{arguments[@]}}" "$run_dir"'
    return subprocess.run(["bash", "-c", shown], check=True, capture_output=True, text=True).stdout.splitlines()


def test_one_machine_is_one_task_with_the_cores_of_all_ranks(capsys):
    text = script(capsys, CPU, "trainer.nproc=4", "--cpus-per-task=3", "--partition=p", "--exclusive")
    expected = {"--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=12", "--partition=p", "--exclusive", "--requeue"}
    assert expected <= options(text)
    assert not any("gpu" in option for option in options(text))
    assert "RANK" not in text


def test_several_machines_have_a_task_for_each_rank(capsys):
    text = script(capsys, CPU, "trainer.nproc=4", "trainer.nnodes=3", "--cpus-per-task=3")
    assert {"--nodes=3", "--ntasks-per-node=4", "--cpus-per-task=3"} <= options(text)
    assert "LOCAL_WORLD_SIZE=4" in text


def test_the_signal_comes_before_the_time_limit_by_the_grace_of_the_run(capsys):
    assert "--signal=B:USR1@660" in options(script(capsys, CPU, "trainer.preempt_grace_s=600", "--time=11:01"))
    assert main([CPU, "trainer.preempt_grace_s=600", "--time=11", "--dry-run"]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "--time=11", "660 s", "trainer.preempt_grace_s")


@pytest.mark.parametrize(
    ("words", "gpus", "nproc"),
    [
        (["trainer.nproc=8"], "--gpus-per-node=8", 8),
        (["--gpus-per-node=a100:4"], "--gpus-per-node=a100:4", 4),
        (["--gres=gpu:h100:2,tmpfs:10G"], "--gres=gpu:h100:2,tmpfs:10G", 2),
        ([], "--gpus-per-node=1", 1),
    ],
)
def test_gpus_and_ranks_fit_each_other(capsys, words, gpus, nproc):
    text = script(capsys, *words)
    assert [option for option in options(text) if "gpu" in option] == [gpus]
    assert f"trainer.nproc={nproc}" in arguments(text)


def test_arguments_reach_the_run_as_they_were_typed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    awkward = [CPU, "trainer.project_name='a b'", 'trainer.experiment_name="it\'s $HOME"']
    *found, run_dir = arguments(script(capsys, *awkward))
    assert found == [*awkward, "trainer.nproc=1"]
    assert run_dir == str(tmp_path / "checkpoints/a b/it's $HOME")


def test_each_task_of_a_sweep_is_the_run_that_the_sweep_would_make(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = script(capsys, CPU, "-m", "trainer.seed=1,2", "algorithm=grpo,rloo", "--array-parallelism=2")
    assert {"--array=0-3%2", "--output=rlhf-%A_%a.log"} <= options(text)
    name = "offline-trainer.seed-2-algorithm-grpo"
    *found, run_dir = arguments(text, "SLURM_ARRAY_TASK_ID=2\n")
    settings = ["trainer.seed=2", "algorithm=grpo", f"trainer.experiment_name={name}", "trainer.nproc=1"]
    assert found == [CPU, *settings]
    assert Path(run_dir).name == name


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["trainer.nproq=2"], ["trainer.nproq=2", "trainer.nproc"]),
        (["data.train_files=nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["--nodes=2"], ["--nodes=2", "trainer.nnodes"]),
        (["--array=1-3"], ["--array=1-3", "-m"]),
        # The script looked for checkpoints in another folder than the run, and gave up after three attempts.
        (["--chdir=/scratch"], ["--chdir=/scratch", "in that folder"]),
        (["--partition", "gpu"], ["--partition=gpu"]),
        (["-p", "gpu"], ["-p", "--NAME=VALUE"]),
        (["--cpus-per-task=4-8"], ["--cpus-per-task=4-8", "a whole number"]),
        (["--trainer.nnodes=2"], ["--trainer.nnodes=2", "KEY=VALUE"]),
        (["-m", "trainer.nproc=1,2"], ["trainer.nproc", "same machines"]),
        (["-m", "trainer.preempt_grace_s=60,900"], ["trainer.preempt_grace_s", "same machines and options"]),
        (["trainer.nnodes=2", "trainer.callbacks=[{folder}/mine.py:follow]"], ["trainer.callbacks", "supervisor"]),
        (["data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "rollout.n=2", "trainer.nnodes=3",
          "trainer.nproc=2"], ["trainer.nnodes", "=6"]),
    ],
)  # fmt: skip
def test_a_mistake_is_found_before_anything_is_submitted(capsys, monkeypatch, tmp_path, words, facts):
    (tmp_path / "mine.py").write_text("def follow(step, metrics):\n    pass\n")
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch there
    assert main([CPU, *(word.format(folder=tmp_path) for word in words)]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, *facts)


def test_the_script_stores_no_secret(capsys, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text("def score(solution_str, ground_truth, api_key):\n    return 1.0\n")
    functions = f"reward.functions=[{tmp_path}/mine.py:score]"
    for typed in ("hunter2", "'hunter2\\'x'", "'${trainer.seed}sk-hunter2hunter2hunter2'"):
        assert main([CPU, functions, f"+reward.kwargs.api_key={typed}", "--dry-run"]) == EXIT_USER_ERROR
        shown = capsys.readouterr()
        says(shown.err, "reward.kwargs.api_key", "${oc.env:NAME}")
        assert "hunter2" not in shown.out + shown.err
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    assert main([CPU, functions, "+reward.kwargs.api_key=${oc.env:JUDGE_KEY}", "--dry-run"]) == EXIT_DONE
    shown = capsys.readouterr()
    assert "${oc.env:JUDGE_KEY}" in shown.out
    assert "hunter2" not in shown.out + shown.err


def test_without_slurm_the_command_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([CPU]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "sbatch is not installed", "--dry-run")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:01", 3601), ("2-3", 183600), ("1-0:1", 86460), ("1-0:0:1", 86401), ("x", None)],
)
def test_times_in_sbatchs_syntax(text, seconds):
    assert seconds_of(text) == seconds


def test_options_are_sorted():
    words = sort_words(["a=1", "--time=1", "-m", "--config-dir", "conf", "b=2", "--hold"])
    assert (words.overrides, words.own) == (["a=1", "b=2"], ["-m", "--config-dir=conf"])
    assert words.sbatch == {"time": "1", "hold": None}
    assert gpus_of({"gres": "tmpfs:1"}) is None
    with pytest.raises(UserError) as raised:
        sort_words(["--signal=USR1", "--requeue"])
    says(raised.value, "trainer.preempt_grace_s", "--requeue")
    with pytest.raises(UserError) as raised:
        sort_words(["--comment=first\nrm -rf x"])
    says(raised.value, "--comment=first", "line break")
