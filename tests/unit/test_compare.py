"""python -m rlhf.compare: one table for any runs, and one message for a folder that is damaged or not a run."""

import json
from pathlib import Path

import pytest

from rlhf.cli.compare import main
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from rlhf.tracking import History, write_report
from rlhf.tracking.live_state import check_run_dir
from tests.support.refusals import says, user_error

LIBRARY = Library.find(None)


def run(folder: Path, rate: float, steps: int, *, reported: bool, **metrics: float) -> Path:
    """Write the files of a run of `steps` steps, with its report if it is finished."""
    folder.mkdir()
    config = compose_config([f"actor.optim.lr={rate}", f"trainer.experiment_name={folder.name}"], LIBRARY)
    (folder / "resolved.yaml").write_text(to_yaml(config))
    history = History(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        history.append({"step": step, "reward/mean": step / 4, "timing_s/step": 40.0, **metrics})
    if reported:
        write_report(folder)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        run(tmp_path / "slow", 1e-5, 2, reported=True, **{"val/accuracy": 0.25}),
        run(tmp_path / "fast", 3e-3, 3, reported=False, **{"val/accuracy": 0.5}),
    ]


def test_runs_side_by_side_with_the_settings_that_differ(runs, capsys):
    assert main([*map(str, runs)]) == EXIT_DONE
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    head, *lines = text.splitlines()
    assert head.split() == ["run", "steps", "reward", "accuracy", "time", "status"]
    assert [line.split()[-5:] for line in lines if "%" in line] == [
        ["2", "0.500", "25.0%", "1m20s", "finished"],
        ["3", "0.750", "50.0%", "2m00s", "crashed"],
    ]
    says(text, "slow", "actor.optim.lr=1e-05", "fast", "actor.optim.lr=0.003")
    assert "experiment_name" not in text


def test_a_checkpoint_instead_of_its_run(runs, capsys):
    (runs[0] / "global_step_2").mkdir()
    assert main([str(runs[0] / "global_step_2")]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "global_step_2 is not a run directory", f"in the run directory {runs[0]}.")


def test_json_has_the_reports(runs, capsys):
    assert main([*map(str, runs), "--json"]) == EXIT_DONE
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert first["report"] == json.loads((runs[0] / "report" / "report.json").read_text())
    assert [first["status"], second["status"]] == ["finished", "crashed"]
    assert [first["settings"], second["settings"]] == [{"actor.optim.lr": 1e-5}, {"actor.optim.lr": 3e-3}]
    assert second["report"]["reward"] == [[1, 0.25], [2, 0.5], [3, 0.75]]


def test_a_run_that_goes_on_after_its_report_is_not_finished(runs, capsys):
    History(runs[0] / "metrics.jsonl").append({"step": 3, "reward/mean": 1.0})
    assert main([str(runs[0])]) == EXIT_DONE
    assert capsys.readouterr().out.split()[-1] == "crashed"


def test_a_run_without_steps_has_a_row(tmp_path, capsys):
    assert main([str(run(tmp_path / "new", 1e-5, 0, reported=False))]) == EXIT_DONE
    assert capsys.readouterr().out.split()[-4:] == ["-", "0s", "not", "started"]


DAMAGED = {
    "metrics.jsonl": (
        '{"step": 1, "reward/mean": "high"}\n',
        b'{"step": 1\n{"step": 2}\n',
        b"\xff\xfe{}\n{}\n",
        f'{{"step": {10**30}, "reward/mean": 1.0}}\n',
        '{"step": 1, "timing_s/step": 1e308}\n{"step": 2, "timing_s/step": 1e308}\n',
    ),
    "resolved.yaml": ("a: [", b"\xff", "- 1\n", "model: {path: 2020-01-01}\n"),
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, contents in DAMAGED.items() for content in contents]
)
def test_a_damaged_run_has_one_message(runs, capsys, name, content):
    path = runs[0] / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main([*map(str, runs)]) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    says(captured.err, str(runs[0]), name)
    assert "estore" in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("error:") == 1
    assert captured.out == ""


def test_folders_that_are_not_runs_are_named_together(runs, tmp_path, capsys):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert main([str(foreign), str(runs[0]), str(tmp_path / "missing")]) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    says(captured.err, str(foreign), "not a run directory", str(tmp_path / "missing"))
    assert captured.out == ""


def test_a_folder_of_runs_and_a_missing_folder_have_messages_of_their_own(runs, tmp_path, capsys):
    assert main([str(tmp_path)]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "not a run directory", f"{tmp_path}/*/")
    assert main([str(tmp_path / "missing")]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, str(tmp_path / "missing"), "no such folder")


@pytest.mark.parametrize(
    "setting",
    [
        "data.val_files=other.jsonl",
        "rollout.val_kwargs.temperature=0.5",
        "reward_model.path=other",
        "critic.path=other",
    ],
)
def test_settings_that_results_depend_on_though_a_resume_may_change_them(runs, capsys, setting):
    key, _, value = setting.partition("=")
    path = runs[1] / "resolved.yaml"
    section, *_, name = key.split(".")
    lines = path.read_text().splitlines()
    start = lines.index("  val_kwargs:" if "val_kwargs" in key else f"{section}:")
    at = next(i for i in range(start, len(lines)) if lines[i].strip().startswith(f"{name}:"))
    lines[at] = f"{lines[at].partition(':')[0]}: {value}"
    path.write_text("\n".join(lines))
    assert main([*map(str, runs), "--json"]) == EXIT_DONE
    _, second = json.loads(capsys.readouterr().out)["runs"]
    assert str(second["settings"][key]) == value


def test_a_folder_of_projects_names_its_runs(tmp_path):
    (tmp_path / "rlhf" / "a").mkdir(parents=True)
    says(user_error(check_run_dir, tmp_path), f"{tmp_path} is not a run directory", "PROJECT/EXPERIMENT")
    (tmp_path / "rlhf" / "a" / "resolved.yaml").touch()
    says(user_error(check_run_dir, tmp_path), f"Its runs are {tmp_path}/*/*/.")
    says(user_error(check_run_dir, tmp_path / "rlhf"), f"Its runs are {tmp_path}/rlhf/*/.")
