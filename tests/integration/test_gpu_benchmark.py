"""python -m benchmarks.gpu on a machine without a GPU: it reports this, and a rehearsal runs its parts on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import NO_GPU, PARTS, run_here
from benchmarks.gpu_parts.place import Place

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = command("--results", str(tmp_path / "results"))
    assert done.returncode == NO_GPU
    assert "no GPU" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_rehearsal_appends_figures_of_each_part(tmp_path):
    """Rehearse the parts that start no tests and need no GPU kernels, with kills and every kind of checkpoint."""
    results = tmp_path / "results"
    parts = ("varlen", "save", "contents", "kills")
    done = command("--rehearse", "--results", str(results), *(word for part in parts for word in ("--part", part)))
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["part"] for line in lines] == list(parts)
    assert all(line["rehearsal"] and line["releases"]["torch"] for line in lines)
    assert "CPUs" in lines[0]["skipped"]
    assert all(line["missed"] == [] for line in lines[1:])
    kills = lines[3]["figures"]
    assert (kills["rollout.before"], kills["commit.file_write"]) == ("equal", "equal")


def test_a_missed_goal_and_an_error_are_in_the_results(monkeypatch):
    def misses(place: Place) -> dict[str, int]:
        place.rehearsal = False
        place.goal(False, "too slow")
        return {"seconds": 9}

    def fails(place: Place) -> dict[str, int]:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(PARTS, "step", misses)
    monkeypatch.setitem(PARTS, "lora", fails)
    assert run_here("step", rehearsal=True)["missed"] == ["too slow"]
    assert "no such kernel" in run_here("lora", rehearsal=True)["error"]
