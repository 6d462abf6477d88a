"""Runs with sampling masks, killed with masks in the journal, in carried groups and in samples in flight: the end has
the bits of an undisturbed run."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlhf.storage.layout import CARRIED, scan
from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import ranks, records, small

SETTINGS = (
    "rollout.top_k=8",
    "rollout.top_p=0.95",
    "rollout.sampling_mask=true",
    "rollout.temperature=1.3",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.on_limit=fill",
    "data.max_response_length=32",
    "actor.entropy_coeff=0.01",
    "actor.ppo_epochs=2",
    "reward.functions=[tests/support/graded.py:nearness]",
    "checkpoint.journal=true",
    "checkpoint.async_save=false",
)


def has_masks(checkpoint: Path) -> set[str]:
    """Return the prefixes of the samples with masks in a checkpoint: "" for carried groups, "begun." in flight."""
    found = set()
    for path in (checkpoint / CARRIED).iterdir():
        found |= {name.removesuffix("mask_counts") for name in load_file(path) if name.endswith("mask_counts")}
    return found


CASES = {
    # Samples with masks in a checkpoint, ranks, and settings.
    "begun.": (1, "rollout.async_steps=1", "data.gen_batch_size=12"),
    "": (2, "data.gen_batch_size=24"),
}


@pytest.mark.slow
@pytest.mark.parametrize("prefix", CASES, ids=["in flight", "carried"])
def test_a_kill_costs_no_sample_and_no_bit(prefix, sums, tmp_path: Path):
    nproc, *more = CASES[prefix]

    def run(name: str, environment: dict[str, str] | None = None) -> int:
        return ranks(tmp_path / "log", small(tmp_path, name, sums, *SETTINGS, *more), environment, nproc).code

    assert run("undisturbed") == 0
    killed = tmp_path / "rlhf" / "killed"
    # A step has two epochs of two mini-batches. Step 3 is saved; the kill is in step 5.
    assert run("killed", at("update.mid", 19, "SIGKILL")) == -9
    assert prefix in has_masks(scan(killed)[0])
    assert run("killed") == 0
    assert differences(tmp_path / "rlhf" / "undisturbed", killed) == []
    shares = {record["step"]: record.get("perf/journal_samples") for record in records(killed)}
    assert 1.0 in (shares[4], shares[5])
