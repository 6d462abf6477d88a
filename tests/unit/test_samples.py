"""Samples for users to read: their files, the command that shows them, and their form in trackers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.cli import samples
from rlhf.config import TrackingConfig, TrainerConfig
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.tracking import Tracker
from rlhf.tracking.run_log import RunLog
from rlhf.tracking.sample_files import GenerationsTable, SampleFiles, as_text, markdown_table


def sample(split: str, uid: int, score: float, response: str = "7") -> dict:
    return {
        "split": split,
        "uid": uid,
        "sample": 0,
        "data_source": "sums",
        "prompt": f"3 + {uid} =",
        "response": response,
        "ground_truth": "7",
        "score": score,
        "rewards": {"exact_match": score},
        "extra": {},
        "advantage": 0.5 if split == "rollout" else None,
        "length": 1,
        "finish_reason": "stop",
        "version": 3,
    }


@pytest.fixture
def run(tmp_path) -> Path:
    files = SampleFiles(tmp_path)
    for step in (1, 2):
        files.write(step, [sample("rollout", uid, uid / 4 - step) for uid in range(12)])
    files.write(3, [sample("rollout", 0, 1.0, "ga\x1b[31mrbage\nline"), sample("validation", 7, 0.0, "né \ud83d")])
    return tmp_path


def shown(capsys, *arguments: object) -> list[dict]:
    assert samples.main([*map(str, arguments), "--json"]) == EXIT_DONE
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_newest_step_is_shown_or_those_that_are_asked_for(run, capsys):
    assert [(each["step"], each["uid"]) for each in shown(capsys, run)] == [(3, 0), (3, 7)]
    assert [each["uid"] for each in shown(capsys, run, "--step", 2)] == list(range(10))
    assert len(shown(capsys, run, "--step", 2, "--count", 0)) == 12
    assert len(shown(capsys, run, "--all", "--count", 0)) == 26
    assert [each["uid"] for each in shown(capsys, run, "--split", "validation")] == [7]
    assert [each["uid"] for each in shown(capsys, run, "--all", "--grep", "3 + 11")] == [11, 11]
    worst = shown(capsys, run, "--all", "--worst", 3)
    assert [(each["step"], each["uid"]) for each in worst] == [(2, 0), (2, 1), (2, 2)]
    assert [each["score"] for each in shown(capsys, run, "--step", 1, "--best", 2)] == [1.75, 1.5]


def test_control_characters_in_responses_are_escaped(run, capsys):
    assert samples.main([str(run)]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "  response: ga\\x1b[31mrbage\n    line\n" in text
    assert "step 3, rollout 0.0: score 1, advantage +0.5, 1 tokens (stop)\n" in text
    assert "  reference answer: 7\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "9"], "--step=9: the run has samples of steps 1 to 3."),
        (["--grep", "nowhere"], "has no matching samples; it has samples of steps 1 to 3"),
        (["--split", "validation", "--step", "1"], "has no matching samples"),
    ],
)
def test_a_missing_step_or_sample_is_one_line(run, capsys, arguments, message):
    assert samples.main([str(run), *arguments]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_mistyped_option_is_one_line(run, capsys):
    with pytest.raises(SystemExit) as end:
        samples.main([str(run), "--wrost", "3"])
    assert end.value.code == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert "--wrost 3 is not known. Did you mean --worst?" in error
    assert error.count("\n") == 1


def test_a_folder_without_samples_is_one_line(tmp_path, capsys):
    for path, message in ((tmp_path, "has no samples"), (tmp_path / "none", "is not a folder")):
        assert samples.main([str(path)]) == EXIT_USER_ERROR
        assert message in capsys.readouterr().err


TORN = [
    *(b"{", b"[]", b'{"response": 3}', b"\x00" * 9, b'{"response": "\xff"}', b'{"response": "7"}', b"[" * 100_000),
    *(b'{"response": "7", "score": %s}' % score for score in (b"null", b'"a"')),
    b'{"response": "7", "score": 1, "advantage": "a"}',
    b'{"response": "7", "score": 1, "rewards": [1]}',
]


@pytest.mark.parametrize("content", TORN)
def test_a_torn_file_is_named(run, content):
    (run / "samples" / "step_3.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"step_3\.jsonl, line 1, is not a sample"):
        list(SampleFiles(run).read(3))


def test_a_score_that_is_no_number_is_neither_best_nor_worst(tmp_path, capsys):
    SampleFiles(tmp_path).write(1, [sample("rollout", uid, score) for uid, score in enumerate((float("nan"), 1, -1))])
    assert [each["uid"] for each in shown(capsys, tmp_path, "--worst", 2)] == [2, 1]
    assert [each["uid"] for each in shown(capsys, tmp_path, "--best", 2)] == [1, 2]


def test_values_from_a_reward_function_may_be_texts():
    noted = as_text(sample("rollout", 0, 1.0) | {"extra": {"length": 3, "kind": "easy\nto read", "seen": ["a", 1]}})
    assert "length 3" in noted.splitlines()[0]
    assert noted.endswith("\n  kind: easy\n    to read\n  seen: ['a', 1]")


@pytest.mark.parametrize("option", ["--worst", "--best", "--count"])
def test_a_negative_number_of_samples_is_an_error(run, option, capsys):
    with pytest.raises(SystemExit) as ended:
        samples.main([str(run), option, "-1"])
    assert ended.value.code == EXIT_USER_ERROR
    assert "-1: must be a whole number of at least 0 (samples)" in capsys.readouterr().err


def test_the_command_needs_no_torch(run):
    code = "import sys, rlhf.samples\nrlhf.samples.main(sys.argv[1:])\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, capture_output=True)


def test_a_roll_back_and_a_resume_drop_samples_of_later_steps(tmp_path):
    def log() -> RunLog:
        return RunLog(Tracker(TrainerConfig(), TrackingConfig(), {}, tmp_path, "run"), ProgressDisplay(), 10)

    run_log = log()
    run_log.start(0, resumed=False)
    for step in range(1, 5):
        run_log.show([sample("rollout", step, 0.0)])
        run_log.step(step, {"x": 1.0})
    run_log.show([sample("rollout", 5, 0.0)])
    run_log.rewind(2)
    assert SampleFiles(tmp_path).steps() == [1, 2]
    run_log.step(3, {"x": 1.0})
    assert SampleFiles(tmp_path).steps() == [1, 2], "step 3 must not store the sample shown before the rollback"
    log().start(1, resumed=True)
    assert SampleFiles(tmp_path).steps() == [1]
    log().start(0, resumed=False)
    assert SampleFiles(tmp_path).steps() == []


def test_two_samples_of_each_kind_are_shown_when_asked_for(tmp_path, caplog):
    every = [sample("rollout", uid, uid / 4) for uid in range(5)] + [sample("validation", 9, 0.0)]
    for log_samples, wanted in ((True, ["rollout 4.0", "rollout 0.0", "validation 9.0"]), (False, [])):
        caplog.clear()
        tracker = Tracker(TrainerConfig(), TrackingConfig(), {}, tmp_path, "run")
        run_log = RunLog(tracker, ProgressDisplay(), 10, log_samples=log_samples)
        run_log.start(2, resumed=False)
        run_log.show(every)
        with caplog.at_level("INFO"):
            run_log.step(3, {"x": 1.0})
        assert [record.getMessage().split(": ")[0] for record in caplog.records] == [f"step 3, {who}" for who in wanted]


def test_trackers_get_a_table_of_an_evaluation(run):
    assert GenerationsTable(SampleFiles(run), 10).of(1) == []
    (row,) = GenerationsTable(SampleFiles(run), 10).of(3)
    assert row == ["3 + 7 =", "né \ud83d", "7", 0.0, 1, "stop"]
    assert GenerationsTable(SampleFiles(run), 0).of(3) == []
    table = markdown_table(["a", "b"], [["<b>|", "x\ny"]])
    assert table == "| a | b |\n| --- | --- |\n| &lt;b&gt;&#124; | x<br>y |"


def test_a_sample_without_a_prompt_of_this_data_has_no_reference_answer():
    bare = sample("rollout", 1, 0.25) | {"ground_truth": None, "rewards": {"a": 1.0, "b": -0.5}, "extra": {"c": 2.0}}
    text = as_text(bare)
    assert "reference" not in text
    assert "score 0.25, advantage +0.5, a 1, b -0.5, c 2, 1 tokens (stop)" in text
