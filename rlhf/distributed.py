"""Process group, device and threads of one rank, and the few tensor collectives that the loop needs."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.config import TrainerConfig


def pick_device(name: str) -> torch.device:
    """The device of this rank: `auto` takes the CUDA device of its local rank when there is one."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def start(config: TrainerConfig) -> torch.device:
    """Join the process group (gloo for CPU tensors, NCCL for CUDA ones) and apply determinism; returns this rank's device."""
    device = pick_device(config.device)
    deterministic = config.deterministic if config.deterministic is not None else device.type == "cpu"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # cuBLAS picks its workspace at the first call; without this deterministic mode raises.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    if config.threads_per_rank is not None:
        torch.set_num_threads(config.threads_per_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=config.collective_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return device


def all_sum(tensor: Tensor) -> Tensor:
    """Sum over ranks, in place, returned."""
    dist.all_reduce(tensor)
    return tensor


def all_max(tensor: Tensor) -> Tensor:
    """Maximum over ranks, in place, returned."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set on any rank; the same answer everywhere."""
    return bool(all_max(torch.tensor(float(flag), device=device)).item())
