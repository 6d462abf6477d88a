"""Secrets in the settings of a run reach the reward function, and neither the run directory nor the output."""

from pathlib import Path

import pytest

from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from tests.support.forked_start import train_forked
from tests.support.launching import Ended, ranks, records, saved_steps, small, write_sums

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info, api_key, judge, url):
    assert (api_key, url) == ("typed-by-hand", "http://a/b?token=of-the-query"), (api_key, url)
    return {"score": len(solution_str), "judge": float(judge.rpartition("-")[2])}
"""


def start(folder: Path, steps: int, judge: str, *, supervised: bool) -> Ended:
    kwargs = "reward.kwargs={api_key: typed-by-hand, judge: '${oc.env:JUDGE}', url: 'http://a/b?token=of-the-query'}"
    reward = [f"reward.functions=[{folder}/reward.py:score]", kwargs, f"trainer.total_training_steps={steps}"]
    constant = ["actor.optim.lr_scheduler_type=constant", "actor.optim.lr_warmup_steps=0", "trainer.save_freq=1"]
    arguments = [*small(folder, "run", folder / "sums.jsonl"), *reward, *constant]
    if supervised:
        return train_forked(arguments, {"JUDGE": judge})
    return ranks(folder / "log", arguments, {"JUDGE": judge}, nproc=2)


@pytest.mark.parametrize("supervised", [True, False])
def test_a_run_and_its_resume_with_another_secret(tmp_path, supervised):
    write_sums(tmp_path / "sums.jsonl")
    (tmp_path / "reward.py").write_text(REWARD)
    run_dir = tmp_path / "rlhf" / "run"
    for steps, judge in ((1, "of-the-judge-1"), (2, "of-the-judge-2")):
        end = start(tmp_path, steps, judge, supervised=supervised)
        assert end.code == EXIT_DONE, end.output
        not_compared = "reward.kwargs.api_key, reward.kwargs.judge, reward.kwargs.url"
        assert (not_compared in end.output) == (steps == 2), "a resume names what it cannot compare"
        assert "reward.kwargs" not in end.output.replace(not_compared, "")
        written = [end.output.encode(), *(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())]
        for secret in ("typed-by-hand", "of-the-query", judge):
            assert not [content for content in written if secret.encode() in content]
    assert saved_steps(run_dir)[0] == 2
    assert [record["reward/judge"] for record in records(run_dir) if "reward/judge" in record] == [1.0, 2.0]
    assert "${oc.env:JUDGE}" in (run_dir / "global_step_2" / "config.yaml").read_text()


def test_an_error_that_names_a_secret(tmp_path):
    write_sums(tmp_path / "sums.jsonl")
    (tmp_path / "reward.py").write_text(REWARD.replace('("typed-by-hand", ', '("another", '))
    end = start(tmp_path, 1, "of-the-judge-1", supervised=True)
    assert end.code == EXIT_USER_ERROR, end.output
    written = {path: path.read_text() for path in (tmp_path / "rlhf" / "run").rglob("*.[jl]*") if path.is_file()}
    assert "AssertionError" in next(text for path, text in written.items() if path.parent.name == "status")
    for text in (end.output, *written.values()):
        assert "typed-by-hand" not in text
