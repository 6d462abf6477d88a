"""glibc keeps the memory that a rank frees, unless the user's environment says otherwise."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from rlhf.ranks.host_allocator import keep_freed_memory
kept = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        [torch.ones(1 << 20) for _ in range(16)]  # 4 MiB each, 1,024 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


def kept_and_faults(**environment: str) -> tuple[str, int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=plain | environment, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


def test_a_rank_reuses_the_memory_of_dead_tensors():
    kept, faults = kept_and_faults()
    assert kept == "True"
    assert faults < 1024


@pytest.mark.parametrize(
    "own", [{"MALLOC_MMAP_THRESHOLD_": "262144"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=262144"}]
)
def test_the_environment_s_settings_of_glibc_stay_in_force(own: dict[str, str]):
    kept, faults = kept_and_faults(**own)
    assert kept == "False"
    assert faults > 5 * 16 * 1000
