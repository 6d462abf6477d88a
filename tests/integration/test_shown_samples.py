"""Samples of real runs: their texts, rewards and advantages, from one rank and from two."""

import json
from collections import defaultdict
from statistics import mean, stdev

import pytest

from rlhf.tracking.sample_files import SampleFiles
from tests.support.launching import ranks, records, small
from tests.support.rounding import sum_bound

pytestmark = pytest.mark.usefixtures("sums")


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_finished_run_has_samples_of_every_step(undisturbed, nproc):
    run_dir = undisturbed.run_dir(nproc)
    files, history = SampleFiles(run_dir), records(run_dir)
    assert files.steps() == [record["step"] for record in history]
    for record in history:
        splits = defaultdict(list)
        for sample in files.read(record["step"]):
            splits[sample["split"]].append(sample)
        assert ("validation" in splits) == ("val/reward" in record)
        if answers := splits["validation"]:
            assert mean(sample["score"] for sample in answers) == pytest.approx(record["val/reward"], rel=1e-12)
            assert [sample["uid"] for sample in answers] == sorted({sample["uid"] for sample in answers})
        if record["step"]:
            assert len(splits["rollout"]) == 8
            assert {sample["version"] for sample in splits["rollout"]} == {record["step"] - 1}
            assert len({sample["uid"] for sample in splits["rollout"]}) > 1


def test_all_rollouts_of_two_ranks_with_their_advantages(tmp_path, sums):
    settings = ("trainer.total_training_steps=2", "trainer.log_rollouts=-1", "trainer.test_freq=0")
    end = ranks(tmp_path / "log", small(tmp_path, "all", sums, *settings), nproc=2)
    assert end.code == 0, end.output
    run_dir = tmp_path / "rlhf" / "all"
    groups = defaultdict(list)
    for sample in SampleFiles(run_dir).read(2):
        groups[sample["uid"]].append(sample)
    rows = {json.loads(line)["prompt"]: json.loads(line)["answer"] for line in sums.read_text().splitlines()}
    scores = [sample["score"] for group in groups.values() for sample in group]
    assert mean(scores) == pytest.approx(records(run_dir)[-1]["reward/mean"], rel=1e-12)
    for group in groups.values():
        scores = [sample["score"] for sample in group]
        assert [sample["sample"] for sample in group] == list(range(len(group)))
        for sample in group:
            question = next(prompt for prompt in rows if prompt in sample["prompt"])
            assert sample["ground_truth"] == rows[question]
            spread = stdev(scores) + 1e-6
            # Scores are 0 or 1. Float32 rounds a sum of the group's squares, a root, a sum and a quotient.
            expected = (sample["score"] - mean(scores)) / spread
            assert sample["advantage"] == pytest.approx(expected, rel=sum_bound(len(group) + 3), abs=0)
