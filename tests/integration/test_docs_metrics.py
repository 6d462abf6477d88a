"""docs/tracking.md lists every metric that runs log, and no other metric."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.batch import TokenCounts
from rlhf.config.schema.rollout import ServersConfig
from rlhf.learning.utilization import Utilization
from rlhf.models.flops import UpdateFlops
from rlhf.rollout.servers.client import RequestSettings
from rlhf.rollout.servers.fleet_loop import FleetLoop
from rlhf.rollout.servers.secret import Secret
from tests.support.compare_runs import differences
from tests.support.launching import ROOT, copy_run, ranks, records, small, write_sums

pytestmark = pytest.mark.slow

PLACEHOLDERS = {
    "LABEL": "(exact_match|judged)",
    "KEY": "words",
    "SOURCE": ".+",
    "VARIABLE": "(acc|reward|reward/exact_match|reward/judged|words)",
    "PART": "(actor|critic|ref|other)",
    "N": r"\d+",
    "K": r"\d+",
}
FUNCTION = """
def judged(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": -0.5, "words": len(solution_str.split()), "pred": solution_str[:1]}
"""
OF_A_DEVICE = {"perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"}
"""Metrics of a CUDA device, which `tests/unit/test_phase_clock.py` tests."""
OF_ENVIRONMENTS = {"val/env_failed"}
"""A metric of environments, which `tests/unit/test_failed_episodes.py` tests."""


def names_of_the_page() -> list[str]:
    """Return the first cells of the tables in the section about metrics."""
    section = (ROOT / "docs" / "tracking.md").read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| `")]
    assert all(re.fullmatch(r"`[^`]+`", cell) for cell in rows), "each row must have one name"
    return [cell.strip("`") for cell in rows]


def pattern(name: str) -> re.Pattern[str]:
    """Return a pattern that matches the metrics of a name on the page."""
    parts = re.split(f"({'|'.join(PLACEHOLDERS)})(?![A-Za-z])", name)
    return re.compile("".join(PLACEHOLDERS.get(part) or re.escape(part) for part in parts))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Run directories whose settings produce all metrics. `resumed` is `dynamic` after a kill in its last step."""
    folder = tmp_path_factory.mktemp("runs")
    sums, function = write_sums(folder / "sums.jsonl"), folder / "function.py"
    function.write_text(FUNCTION)
    every = (
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        f"data.val_files={sums}",
        "data.val_max_samples=4",
        "rollout.val_kwargs.n=4",
        "rollout.val_kwargs.temperature=1",
        "reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.len=2",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
    )
    ppo = (
        "algorithm=ppo",
        "actor.use_kl_loss=false",
        "algorithm.normalize_reward=running",
        "algorithm.reward_clip_range=[-5,5]",
        f"reward.functions=[exact_match,{function}:judged]",
        "checkpoint.journal=true",
        "checkpoint.memory.freq=1",
        "algorithm.mask_truncated_responses=true",
        f"checkpoint.remote=file://{folder / 'remote'}",
    )
    dynamic = (
        f"reward.functions=[{function}:judged,exact_match]",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=seq_reward",
        "algorithm.filter_groups.on_limit=fill",
        "rollout.async_steps=1",
        "actor.policy_loss.loss_mode=sapo",
        "actor.entropy_ctrl.type=adaptive",
    )
    end = ranks(folder / "log", small(folder, "ppo", sums, *every, *ppo), nproc=2)
    assert end.code == 0, end.output
    end = ranks(folder / "log", small(folder, "dynamic", sums, *every, *dynamic))
    assert end.code == 0, end.output
    for loss in ("clip_cov", "kl_cov"):
        end = ranks(folder / "log", small(folder, loss, sums, f"algorithm={loss}", "trainer.total_training_steps=2"))
        assert end.code == 0, end.output
    copy_run(folder / "rlhf" / "dynamic", folder / "rlhf" / "resumed", last_step=2)
    end = ranks(folder / "log", small(folder, "resumed", sums, *every, *dynamic))
    assert end.code == 0, end.output
    return {name: folder / "rlhf" / name for name in ("ppo", "dynamic", "resumed", "clip_cov", "kl_cov")}


def emitted(runs: dict[str, Path]) -> Iterator[str]:
    """Yield the metrics of the runs, and the metrics that need servers or devices."""
    for run_dir in runs.values():
        for record in records(run_dir):
            yield from record.keys() - {"step"}
    utilization = Utilization(peak=1.0)
    for role in ("actor", "critic"):
        utilization.add(role, UpdateFlops(1, 1, 1), epochs=1)
    timings = {"timing_s/update_actor": 1.0, "timing_s/update_critic": 1.0}
    yield from utilization.metrics(TokenCounts(1, 1, 1), timings)
    yield from FleetLoop(ServersConfig(), {}, RequestSettings([1], {}, 1), Secret("s", "secret"), capacity=1).metrics()
    yield from OF_A_DEVICE | OF_ENVIRONMENTS | {"perf/sync_bytes"}


def test_a_resumed_run_has_the_same_metrics(runs):
    assert differences(runs["dynamic"], runs["resumed"]) == []
    assert any("/maj@4/" in name for name in records(runs["resumed"])[-1])


def test_the_page_and_the_runs_have_the_same_metrics(runs):
    page = names_of_the_page()
    assert len(page) == len(set(page)), "each name must be on the page once"
    patterns = {name: pattern(name) for name in page}
    found = set(emitted(runs))
    missing = {name for name in found if not any(p.fullmatch(name) for p in patterns.values())}
    unknown = {name for name, p in patterns.items() if not any(map(p.fullmatch, found))}
    assert (missing, unknown) == (set(), set())
