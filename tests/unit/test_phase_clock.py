"""Seconds of phases: each phase counts once and completely, on the device's clock if it has one."""

import time

import pytest
import torch

from rlhf.ranks.phase_clock import PhaseClock, largest, memory_use


def test_phases_are_timed_apart_and_added_up():
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(2):
        with clock.phase("ref"):
            time.sleep(0.02)
    with clock.phase("adv"):
        pass
    time.sleep(0.02)  # outside of all phases
    seconds = clock.collect()
    assert list(seconds) == ["timing_s/ref", "timing_s/adv"]
    assert seconds["timing_s/ref"] >= 0.04
    assert seconds["timing_s/adv"] < 0.02
    assert clock.collect() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_phases_on_a_gpu_are_timed_by_the_gpu():
    device = torch.device("cuda", 0)
    clock, matrix = PhaseClock(device), torch.ones(4096, 4096, device=device)
    torch.cuda.synchronize()
    started = time.monotonic()
    with clock.phase("ref"):
        for _ in range(100):
            matrix = matrix @ matrix
    queued = time.monotonic() - started
    with clock.phase("adv"):
        pass
    seconds = clock.collect()
    assert seconds["timing_s/ref"] > 2 * queued
    assert seconds["timing_s/adv"] < seconds["timing_s/ref"] / 10
    used = memory_use(device)
    assert used["perf/max_memory_reserved_gb"] >= used["perf/max_memory_allocated_gb"] >= 2 * 4096**2 * 4 / 2**30


def test_memory_of_this_process(tmp_path):
    before = memory_use(torch.device("cpu"))
    assert list(before) == ["perf/host_rss_gb"]
    kept = torch.ones(32 << 20)  # 128 MiB
    after = memory_use(torch.device("cpu"))
    assert 0.12 < after["perf/host_rss_gb"] - before["perf/host_rss_gb"] < 0.14, kept.shape
    assert memory_use(torch.device("cpu"), tmp_path / "none") == {}


def test_the_seconds_of_the_slowest_rank_are_reported():
    assert largest([{"a": 1.0, "b": 4.0}, {"a": 3.0}]) == {"a": 3.0, "b": 4.0}
    assert largest([{}]) == {}
