"""Sets up a rank's process group, device and threads, and wraps the tensor collectives that the trainer uses."""

import os
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.config import TrainerConfig
from rlhf.errors import UserError
from rlhf.ranks import dims
from rlhf.ranks.host_allocator import keep_freed_memory
from rlhf.ranks.machines import START_FEWER_RANKS, settle_places
from rlhf.ranks.world import STORE_FD

# torch 2.13 renamed the function, and warns callers of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def pick_device(name: str) -> torch.device:
    """Return this rank's device; `auto` is CUDA if CUDA is available, else the CPU.

    A rank that sees several GPUs uses the GPU of its local rank. A rank that sees one GPU uses this GPU: `srun
    --gpus-per-task=1` hides the others.

    Raises UserError if the rank sees several GPUs, but none with the number of its local rank.
    """
    if name != "cuda" and not (name == "auto" and torch.cuda.is_available()):
        return torch.device("cpu")
    gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if 1 < gpus <= local_rank:
        raise UserError(
            f"trainer.device={name}: rank {os.environ.get('RANK', '0')} has local rank {local_rank} (counted from 0), "
            f"but sees only {gpus} GPUs, and each rank needs its own. {START_FEWER_RANKS}"
        )
    return torch.device("cuda", 0 if gpus == 1 else local_rank)


def start(config: TrainerConfig, *, remote_servers: bool = False) -> torch.device:
    """Join the process group (gloo on CPU, NCCL on CUDA), apply the determinism settings, and return the device.

    `remote_servers` is passed to `settle_places`. Raises UserError if a rank has no GPU of its own.
    """
    device = pick_device(config.device)
    deterministic = config.deterministic if config.deterministic is not None else device.type == "cpu"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        configure_cuda(tf32=bool(config.tf32))
    else:
        keep_freed_memory()
    torch.use_deterministic_algorithms(deterministic)
    if config.threads_per_rank is not None:
        torch.set_num_threads(config.threads_per_rank)
    timeout = timedelta(seconds=config.collective_timeout_s)
    store, rank, world_size = _open_store(timeout)
    store = dist.PrefixStore(_agree_on_attempt(store, rank, world_size, timeout), store)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    settle_places(store, rank, world_size, gpu, remote_servers=remote_servers)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def configure_cuda(*, tf32: bool) -> None:
    """Set torch's CUDA options in this process."""
    # Deterministic mode raises without this variable, which cuBLAS reads at its first call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # cuDNN's attention, torch's first choice on Hopper, builds a plan for every new shape, which may take half a
    # second. Packed rows call attention once per sequence, so nearly every response length is a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)


def _open_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    fd = os.environ.pop(STORE_FD, None)
    if fd is None:
        return next(dist.rendezvous("env://", timeout=timeout))
    host, port, world_size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    store = dist.TCPStore(host, int(port), int(world_size), is_master=True, timeout=timeout, master_listen_fd=int(fd))
    return store, 0, int(world_size)


def connect_to_store(timeout: timedelta) -> dist.TCPStore:
    """Return a connection to the ranks' rendezvous store, for a process that is not a rank."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _agree_on_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name for this start of the ranks, equal on all ranks and unlike the name of any earlier start.

    torchrun keeps one store over its restarts, in which new ranks would find the addresses of dead ranks. torchrun's
    restart count does not distinguish the starts, because each node counts by itself. So each rank sends rank 0 a
    random key, waits for the name under that key, and confirms the name. No earlier start can have written that key.

    Raises:
        DistStoreError: some ranks did not start within `timeout`.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank > 0:
        store.set(f"asks/{rank}", own)
        attempt = store.get(f"answer/{own}").decode()
        store.set(f"knows/{attempt}/{rank}", "")
        return attempt
    waiting = set(range(1, world_size))
    while waiting:
        for peer in waiting:
            if store.check([f"asks/{peer}"]):
                # A dead rank may have written `asks/PEER`. The new rank will overwrite the key, and this loop then
                # answers again.
                store.set(f"answer/{store.get(f'asks/{peer}').decode()}", own)
        waiting = {peer for peer in waiting if not store.check([f"knows/{own}/{peer}"])}
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(waiting)} did not start within {timeout}")
        time.sleep(0.01)
    return own


def stop() -> None:
    dist.destroy_process_group()


def all_sum(tensor: Tensor) -> Tensor:
    """Sum `tensor` over the data-parallel ranks, in place, and return it. Collective."""
    dist.all_reduce(tensor, group=dims.data().group)
    return tensor


def all_max(tensor: Tensor) -> Tensor:
    """Take the elementwise maximum of `tensor` over the data-parallel ranks, in place, and return it. Collective."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=dims.data().group)
    return tensor


def all_gather(tensor: Tensor) -> Tensor:
    """Concatenate the tensors of the data-parallel ranks, all of the same shape, along dimension 0. Collective."""
    return gather_from(dims.data(), tensor).flatten(0, 1)


def gather_from(ranks: dims.RankGroup, tensor: Tensor) -> Tensor:
    """Stack the tensors of all `ranks`, all of the same shape, to [ranks, ...]. Collective over `ranks`.

    With one rank, the result is a view of `tensor`.
    """
    if ranks.size == 1:
        return tensor[None]
    gathered = tensor.new_empty(ranks.size, *tensor.shape)
    # Gather into one flat output: with a list of outputs, torch would copy each rank's part once more.
    _all_gather_single(gathered.view(-1), tensor.reshape(-1), group=ranks.group)
    return gathered


def broadcast(tensor: Tensor, source: int) -> None:
    """Copy the `tensor` of the rank `source` into `tensor` on every rank. Collective."""
    dist.broadcast(tensor, source, group=dims.everyone().group)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return whether `flag` is set on any rank. Collective."""
    found = torch.tensor(float(flag), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=dims.everyone().group)
    return bool(found.item())


def all_to_all(flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Exchange entries of tensors between the data-parallel ranks, bit for bit. Collective.

    Args:
        flat: `sent[0]` entries for rank 0, then `sent[1]` entries for rank 1, and so on, [sum(sent), ...].
        received: number of entries from each rank.

    Returns:
        The received entries, [sum(received), ...], in the order of ranks.
    """
    result = flat.new_empty(sum(received), *flat.shape[1:])
    dist.all_to_all_single(result, flat, list(received), list(sent), group=dims.data().group)
    return result
