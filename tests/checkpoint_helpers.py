"""What the tests of the checkpoint subsystem share: a plain role, a small policy under FSDP2, and real ranks on gloo."""

import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context, set_forkserver_preload
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rlhf
from rlhf import events
from rlhf.backends.fsdp2 import Fsdp2Backend
from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.snapshot import Role
from rlhf.checkpoint.tensors import Piece, Pieces
from rlhf.checkpoint.writer import Identity
from rlhf.config import BackendConfig, Config, OptimConfig
from rlhf.events import Listener
from rlhf.models.loading import hf_files

TINY_POLICY = Path(rlhf.__file__).parent / "models" / "tiny_policy"
IDENTITY = Identity(backend="fsdp2", config_hash="c" * 32, model_fingerprint="f" * 32, versions={"rlhf": "0"})

# Ranks are forked from a server that has imported torch once, but has no threads and no process group.
set_forkserver_preload(["tests.checkpoint_helpers"])


class PlainRole:
    """A role of plain tensors: rank `rank` of `world_size` holds an even range of one weight and of its moment."""

    def __init__(self, size: int = 1000, rank: int = 0, world_size: int = 1, seed: int = 0) -> None:
        start, stop = size * rank // world_size, size * (rank + 1) // world_size
        generator = torch.Generator().manual_seed(seed)
        self.weight, self.moment = (
            torch.randn(size, generator=generator)[start:stop].clone() for _ in ("weight", "moment")
        )
        self.shape, self.start = (size,), start
        self.position = seed

    def model_pieces(self) -> Pieces:
        return {"weight": Piece(self.shape, self.start, self.weight)}

    def optimizer_pieces(self) -> Pieces:
        return {"weight.exp_avg": Piece(self.shape, self.start, self.moment)}

    def extra_state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight

    def hf_files(self) -> Mapping[str, bytes]:
        return {"config.json": b"{}"}


def make_config(folder: Path) -> Config:
    """A configuration whose run directory is `folder`/rlhf/default."""
    config = Config()
    config.model.path = str(TINY_POLICY)
    config.trainer.default_local_dir = str(folder)
    config.trainer.total_training_steps = 10
    return config


def make_checkpointer(
    config: Config, role: Role, step: int = 0, coordinator: Coordinator | None = None, fingerprint: str = "f" * 32
) -> Checkpointer:
    """A checkpointer of one actor; the driver state that it saves stands at `step`."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    driver = {"run_id": "r", "step": step, "total_steps": 10, "steps_per_epoch": 5.0}
    return Checkpointer(config, coordinator or Coordinator(), {"actor": role}, lambda: driver, fingerprint)


def save_steps(config: Config, role: Role, *steps: int) -> None:
    """Save `role` as it is as the checkpoints of `steps`."""
    for step in steps:
        assert make_checkpointer(config, role, step).save(step) is not None


def make_backend(seed: int, *, train_steps: int = 0, tied: bool = False) -> Fsdp2Backend:
    """A random one-layer policy under FSDP2 with odd sizes, `train_steps` optimizer steps from its start."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    torch.manual_seed(seed)
    shape = {"hidden_size": 12, "intermediate_size": 17, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    model = LlamaForCausalLM(config)
    backend = Fsdp2Backend(
        model,
        BackendConfig(),
        OptimConfig(lr=0.01, lr_scheduler_type="cosine", lr_warmup_steps=2),
        torch.device("cpu"),
        1.0,
        grad_clip=1.0,
        total_optimizer_steps=20,
        hf_files=hf_files(config, tokenizer, model.generation_config),
    )
    for step in range(train_steps):
        ids = torch.arange(10).view(2, 5) * (step + 1)
        backend.backward(backend.model(input_ids=ids).logits.float().square().mean())
        backend.optimizer_step()
    return backend


def whole_state(backend: Fsdp2Backend) -> dict[str, dict[str, Any]]:
    """Copies of everything that a checkpoint restores in a role, by item of `checkpoint.contents`. Collective."""
    optimizer = {
        f"{name}.{key}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, parameter in backend.model.named_parameters()
        for key, value in backend.optimizer.state[parameter].items()
    }
    rates = [group["lr"] for group in backend.optimizer.param_groups]
    return {
        "model": {name: tensor.clone() for name, tensor in backend.full_tensors()},
        "optimizer": optimizer,
        "extra": backend.extra_state() | {"rates": rates},
    }


def equal_bits(a: Any, b: Any) -> bool:
    """Whether two nests of mappings, tensors and plain values are the same, NaNs and signs of zeros included."""
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        same_kind = a.dtype == b.dtype and a.shape == b.shape
        return same_kind and np.array_equal(*(t.reshape(-1).view(torch.uint8).numpy() for t in (a, b)))
    return a == b


def files_of(checkpoint: Path) -> set[str]:
    """Every file below `checkpoint`, relative to it."""
    return {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}


def flip_bit(path: Path, bit: int) -> None:
    """Invert one bit of a file in place; a second call restores it."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` at every event of this process for a while."""
    events.subscribe(listener)
    try:
        yield
    finally:
        events._listeners.remove(listener)


@contextmanager
def world_of_one(folder: Path) -> Iterator[None]:
    """A gloo process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float, join: Path) -> list:
    """`function(rank, *arguments)` in `world_size` real processes; what each returned, "died" for one that ended by itself.

    They join a gloo group over files in the folder `join`. Fails when one raises, or when one is still there after `deadline_s`.
    """
    context = get_context("forkserver")
    join.mkdir(parents=True, exist_ok=True)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(rank, world_size, str(join), sender, function, arguments)))
        pipes.append(receiver)
        processes[-1].start()
        sender.close()
    end = time.monotonic() + deadline_s
    outcomes: dict[int, Any] = {}
    try:
        while len(outcomes) < world_size:
            ready = wait([p for r, p in enumerate(pipes) if r not in outcomes], max(0.0, end - time.monotonic()))
            assert ready, f"ranks {set(range(world_size)) - outcomes.keys()} are still there after {deadline_s} s"
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    error, outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    error, outcomes[rank] = None, "died"
                assert error is None, f"rank {rank}:\n{error}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [outcomes[rank] for rank in range(world_size)]


def _rank(rank: int, world_size: int, join: str, sender: Any, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    outcome: tuple[str | None, Any]
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{join}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        outcome = None, function(rank, *arguments)
    except BaseException:
        outcome = traceback.format_exc(), None
    # Not sender.send, which would share the memory of tensors with a process that is about to end.
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    # Peers may still need the connection; the parent ends all ranks at once.
    time.sleep(3600)
