"""The first three steps of the offline recipe have the bits that they had when this was written.

What a change of the code does to the bits shows here in seconds; so does a release of transformers or reasoning-gym
that changes them. torch chooses its kernels by its version, the maker of the processor and the instructions that it
has: for another place than those of `KNOWN` nothing is known, and the test is skipped with what it found there, which
is the line to add on a commit that is known to be right.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from rlhf.errors import EXIT_DONE
from tests.support.compare_runs import driver_state
from tests.support.launching import ranks

# (torch, processor, instructions) -> sha256 of the weights, of the optimizer's state and of the driver state after step
# 3.
KNOWN: dict[tuple[str, str, str], dict[str, str]] = {
    ("2.13.0+cpu", "GenuineIntel", "AVX512"): {
        "model": "ec813f1c426c4eb1c33e9880c3098acc3ac36997313bb9f181ae0c812b002a7a",
        "optimizer": "216055f9834be40f7d08377ec066988181a3f5030e9da88f6185315118b18270",
        "driver_state": "88717713f2f347b62f761248fc2aace99526ad5cc7ad21bfabd4ded380efb69d",
    },
}


def place() -> tuple[str, str, str]:
    cpu = Path("/proc/cpuinfo").read_text()
    maker = next((line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("vendor_id")), "unknown")
    return torch.__version__, maker, torch.backends.cpu.get_cpu_capability()


def test_three_steps_of_the_offline_recipe_have_the_known_bits(tmp_path: Path):
    end = ranks(
        tmp_path / "log",
        [
            f"trainer.default_local_dir={tmp_path}",
            "trainer.total_training_steps=3",
            "trainer.val_before_train=false",
            "trainer.device=cpu",
            "trainer.threads_per_rank=1",
        ],
    )
    assert end.code == EXIT_DONE, end.output
    checkpoint = tmp_path / "rlhf" / "offline" / "global_step_3"
    contents = {name: checkpoint / "actor" / name / "rank_00000.safetensors" for name in ("model", "optimizer")}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in contents.items()}
    state = json.dumps(driver_state(checkpoint), sort_keys=True)
    digests["driver_state"] = hashlib.sha256(state.encode()).hexdigest()
    if place() not in KNOWN:
        pytest.skip(f"the bits are not known here: {place()}: {digests}")
    assert digests == KNOWN[place()], state
