"""Checks GPUs and cores against the ranks of a run, and the GPU driver against torch. Imports no torch."""

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.diagnosis.check_result import Outcome, counted, error, ok, warning
from rlhf.planning.devices import count_gpus, devices_problem, lacks_gpu, usable_cores, visible_gpus

FIELDS = ("name", "memory.used", "ecc.errors.uncorrected.volatile.total")
"""Fields of nvidia-smi: the name, MiB in use, and memory errors since the last reset (or [N/A])."""
BUSY_MIB = 1024
"""A GPU with more MiB of memory in use counts as busy. The driver itself uses less."""


def check_devices(trainer: TrainerConfig, server_gpus: int, *, own_gpu: bool, running: bool) -> Iterator[Outcome]:
    """Check the devices of this node's ranks.

    Args:
        server_gpus: GPUs for rollout servers that the run starts.
        own_gpu: whether a launcher gave this process one GPU and hides the GPUs of other ranks.
        running: whether rollout servers of the run may be using the GPUs now.
    """
    gpus, cores, ranks = count_gpus(), usable_cores(), trainer.ranks
    found = list(driver_problems(trainer.device, driver_version(), torch_version_file()))
    if trainer.device == "cpu" or (trainer.device == "auto" and not gpus):
        if ranks > cores:
            found.append(warning(f"{ranks} ranks share {counted(cores, 'core')}. Set trainer.nproc={cores} or fewer."))
        yield from found or [ok(f"no GPU in use; {counted(cores, 'core')} for {counted(ranks, 'rank')}")]
        return
    if not own_gpu and (problem := devices_problem(trainer, gpus)):
        found.append(error(problem))
    elif not own_gpu and ranks + server_gpus > gpus:
        text = (
            f"trainer.nproc={ranks} and the rollout servers need {ranks + server_gpus} GPUs, and {gpus} are visible. "
        )
        fewer = f"Set trainer.nproc={gpus - server_gpus}, or lower" if gpus > server_gpus else "Lower"
        found.append(error(f"{text}{fewer} rollout.servers.count."))
    rows = visible_gpus(FIELDS)
    if rows is None and gpus:
        found.append(warning("nvidia-smi does not answer. Check the driver with nvidia-smi."))
    found += gpu_problems(rows or [], busy=not running)
    names = ", ".join(sorted({row[1] for row in rows or []}))
    yield from found or [ok(f"{counted(gpus, 'GPU')} visible ({names}) for {counted(ranks, 'rank')}")]


def gpu_problems(rows: Sequence[Sequence[str]], *, busy: bool) -> Iterator[Outcome]:
    """Yield a finding for each GPU with memory errors, and with `busy` for each GPU that other processes use.

    Args:
        rows: MiB of memory and the values of FIELDS of each visible GPU.
    """
    for number, (_, name, used, errors) in enumerate(rows):
        if errors.isdigit() and int(errors):
            yield error(
                f"GPU {number} ({name}) has {errors} uncorrected memory errors. Reset it with nvidia-smi --gpu-reset; "
                "if they come back, replace it."
            )
        if busy and used.isdigit() and int(used) > BUSY_MIB:
            yield warning(
                f"GPU {number} ({name}) has {int(used) / 1024:.1f} GiB in use by other processes. End the processes "
                "that nvidia-smi lists."
            )


def driver_problems(device: str, driver: int | None, torch: ModuleType | None) -> Iterator[Outcome]:
    """Yield a finding if torch cannot use the driver.

    Args:
        driver: newest CUDA version that the driver supports, 1000 times the major plus 10 times the minor version.
        torch: torch's module with its versions.
    """
    if torch is None or device == "cpu" or lacks_gpu_driver(driver):
        return
    assert driver is not None
    supported = f"{driver // 1000}.{driver % 1000 // 10}"
    built = getattr(torch, "cuda", None)
    if built is None:
        level = error if device == "cuda" else warning
        yield level(
            f"torch {torch.__version__} is built without CUDA, but the machine has a driver for CUDA {supported}. "
            "Install PyPI's torch: pip install --force-reinstall 'torch>=2.11,<2.14'."
        )
    elif int(built.partition(".")[0]) > driver // 1000:
        yield error(
            f"torch {torch.__version__} needs CUDA {built}, and the driver supports CUDA {supported}. Update the "
            f"driver, or install a torch for CUDA {driver // 1000}."
        )


def lacks_gpu_driver(driver: int | None) -> bool:
    return driver is None or lacks_gpu()


def driver_version() -> int | None:
    """Return the newest CUDA version that NVIDIA's driver supports, such as 12040 for 12.4; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_int()
    return found.value if library.cuDriverGetVersion(ctypes.byref(found)) == 0 and found.value else None


def torch_version_file() -> ModuleType | None:
    """Return torch's module of versions, without the slow import of torch; None if torch is not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    spec = importlib.util.spec_from_file_location("torch_versions", Path(found.origin).with_name("version.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
