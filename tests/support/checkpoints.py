"""Shares parts of checkpoint tests: a plain role, a small policy under FSDP2, and real ranks on gloo."""

import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rlhf
from rlhf import events
from rlhf.backends.fsdp2 import Fsdp2Backend
from rlhf.backends.training import Training
from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config import BackendConfig, Config, OptimConfig
from rlhf.config.compare import ResolvedConfig
from rlhf.events import Listener
from rlhf.models.fingerprint import fingerprint
from rlhf.models.loading import hf_files
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.file_parts import FileParts
from rlhf.storage.shards import Shard, Shards
from rlhf.storage.state import Carried, MovingReference, Stateful, TrainState
from tests.support.preload import forkserver
from tests.support.thread_ranks import make_coordinator

TINY_POLICY = Path(rlhf.__file__).parent / "models" / "tiny_policy"
IDENTITY = Identity(
    backend="fsdp2",
    config_hash="c" * 32,
    fingerprints={"model.path": fingerprint(TINY_POLICY)},
    versions={"rlhf": "0"},
    threads=[1],
)


class PlainRole:
    """A role of plain tensors: each rank has an even range of one weight and its moment."""

    def __init__(self, size: int = 1000, rank: int = 0, world_size: int = 1, seed: int = 0) -> None:
        self.weight, self.start = even_range(size, rank, world_size, seed)
        self.moment, _ = even_range(size, rank, world_size, seed + 1000)
        self.shape = (size,)
        self.position = seed

    def model_shards(self) -> Shards:
        return {"weight": Shard(self.shape, (self.start,), self.weight)}

    def optimizer_shards(self) -> Shards:
        return {"weight.exp_avg": Shard(self.shape, (self.start,), self.moment)}

    def extra_state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def after_load(self) -> None:
        pass

    def hf_parts(self) -> FileParts:
        return {}

    def hf_files(self) -> Mapping[str, bytes]:
        return {"config.json": b"{}"}


class PlainReference:
    """A moving reference of one plain tensor, with an even range per rank."""

    def __init__(self, size: int = 1000, rank: int = 0, world_size: int = 1) -> None:
        self._own = size, rank, world_size
        self.updated_at = 0
        self.weight, self.start = even_range(size, rank, world_size, seed=0)

    def update(self, step: int) -> None:
        """Set the reference to its values after `step`, in place."""
        self.weight.copy_(even_range(*self._own, seed=step)[0])
        self.updated_at = step

    def shards(self) -> Shards:
        return {"weight": Shard((self._own[0],), (self.start,), self.weight)}

    def state_dict(self) -> dict[str, Any]:
        return {"updated_at": self.updated_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updated_at = state["updated_at"]


class PlainPart:
    """A counter in the driver state."""

    def __init__(self, count: int = 0) -> None:
        self.state: dict[str, Any] = {"count": count}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class PlainCarried:
    """Tensors that a rank carries over, or none."""

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.held = [tensors] if tensors else []

    def tensors(self) -> Mapping[str, Tensor]:
        return self.held[0] if self.held else {}

    def load_tensors(self, saved: list[dict[str, Tensor]]) -> None:
        self.held = saved


def even_range(size: int, rank: int, world_size: int, seed: int) -> tuple[Tensor, int]:
    """Return the part of `rank` of a random tensor from `seed`, and its start."""
    start, stop = size * rank // world_size, size * (rank + 1) // world_size
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))[start:stop].clone(), start


def make_config(folder: Path) -> Config:
    """Return a configuration with the run directory `folder`/rlhf/default and synchronous saves."""
    config = Config()
    config.checkpoint.async_save = False
    config.model.path = str(TINY_POLICY)
    config.trainer.default_local_dir = str(folder)
    config.trainer.total_training_steps = 10
    return config


def make_checkpointer(
    config: Config,
    role: TrainState | Mapping[str, TrainState],
    step: int = 0,
    coordinator: Coordinator | None = None,
    fingerprints: Mapping[str, str] = IDENTITY.fingerprints,
    *,
    driver: DriverState | None = None,
    parts: Mapping[str, Stateful] | None = None,
    reference: MovingReference | None = None,
    carried: Carried | None = None,
    threads: list[int] | None = None,
) -> Checkpointer:
    """Return a checkpointer of one actor, or of several roles by name, whose driver state is at `step`."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    roles = role if isinstance(role, Mapping) else {"actor": role}
    driver = driver or make_driver(step)
    coordinator = coordinator or make_coordinator()
    resolved = ResolvedConfig.of(config)
    identity = Identity.of_run(
        config.backend.name, resolved.text, fingerprints, threads or [1] * coordinator.world_size
    )
    state = RunState(roles, driver, parts or {}, reference, carried)
    return Checkpointer(config.run_dir, config.trainer, config.checkpoint, resolved, identity, coordinator, state)


def make_driver(step: int = 0) -> DriverState:
    """Return the driver state of a run of ten steps after `step`."""
    return DriverState("r", 10, 5.0, step=step)


def resume(config: Config, role: TrainState | Mapping[str, TrainState], *arguments: Any, **parts: Any) -> int | None:
    """Resume with a new checkpointer (see `make_checkpointer`), end it, and return the step, or None."""
    driver = make_driver()
    checkpointer = make_checkpointer(config, role, 0, *arguments, driver=driver, **parts)
    with checkpointer.committing():
        return driver.step if checkpointer.resume() else None


def begin_at(config: Config, source: Path, load: list[str] | None = None) -> None:
    """Configure the run to begin at the checkpoint `source` and load the parts `load` (None: `contents`)."""
    config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(source)
    config.checkpoint.load_contents = load


def save_steps(config: Config, role: TrainState, *steps: int, started_on: str | None = None) -> None:
    """Save the unchanged `role` as a checkpoint of each of `steps`, of a run that started on the day `started_on`."""
    for step in steps:
        driver = replace(make_driver(step), started_on=started_on)
        assert make_checkpointer(config, role, step, driver=driver).save(step) is not None


def make_backend(seed: int, *, train_steps: int = 0, tied: bool = False) -> Fsdp2Backend:
    """Return a random one-layer policy with odd sizes under FSDP2, after `train_steps` optimizer steps."""
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
        torch.device("cpu"),
        Training(
            OptimConfig(lr=0.01, lr_scheduler_type="cosine", lr_warmup_steps=2),
            grad_clip=1.0,
            total_optimizer_steps=20,
            hf_files=hf_files(config, tokenizer, model.generation_config),
        ),
    )
    for step in range(train_steps):
        ids = torch.arange(10).view(2, 5) * (step + 1)
        backend.backward(backend.module(input_ids=ids).logits.float().square().mean())
        backend.optimizer_step()
    return backend


def whole_state(backend: Fsdp2Backend) -> dict[str, dict[str, Any]]:
    """Copy all state that a checkpoint restores in a role, by item of `checkpoint.contents`. Collective."""
    optimizer = {
        f"{name}.{key}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, parameter in backend.module.named_parameters()
        for key, value in backend.optimizer.state[parameter].items()
    }
    rates = [group["lr"] for group in backend.optimizer.param_groups]
    return {
        "model": {name: tensor.clone() for name, tensor in backend.full_tensors()},
        "optimizer": optimizer,
        "extra": backend.extra_state() | {"rates": rates},
    }


def equal_bits(a: Any, b: Any) -> bool:
    """Return whether two nested structures are equal, in tensors bit for bit, including NaNs and signs of zeros."""
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal_bits, a, b))
    if isinstance(a, Tensor):
        same_kind = a.dtype == b.dtype and a.shape == b.shape
        return same_kind and np.array_equal(*(t.reshape(-1).view(torch.uint8).numpy() for t in (a, b)))
    return a == b


def files_of(checkpoint: Path) -> set[str]:
    """Return every file below `checkpoint`, as relative paths."""
    return {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}


def flip_bit(path: Path, bit: int) -> None:
    """Invert one bit of a file in place; a second call restores it."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def lose_on_disk(monkeypatch: pytest.MonkeyPatch, path: Path, code: int) -> None:
    """Make reads of the file `path` fail with the error `code`, like a broken disk."""
    preadv = os.preadv

    def failing(descriptor: int, *arguments: Any) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == path:
            raise OSError(code, os.strerror(code))
        return preadv(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", failing)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` at every event of this process in the block."""
    events.subscribe(listener)
    try:
        yield
    finally:
        events._listeners.remove(listener)


@contextmanager
def world_of_one(folder: Path) -> Iterator[None]:
    """Create a gloo process group with only this process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float, join: Path) -> list:
    """Run `function(rank, *arguments)` in `world_size` real processes; return each result, or "died".

    The processes join a gloo group over files in the folder `join`. Fails if a process raises or exceeds `deadline_s`.
    """
    join.mkdir(parents=True, exist_ok=True)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = forkserver.Pipe(duplex=False)
        processes.append(
            forkserver.Process(target=_rank, args=(rank, world_size, str(join), sender, function, arguments))
        )
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
    # Not sender.send, which would share tensors' memory with a process that ends soon.
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    # Peers may still need the connection; the parent ends all ranks at once.
    time.sleep(3600)
