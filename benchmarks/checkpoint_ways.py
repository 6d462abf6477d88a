"""Saves and loads the same state on every rank as raw files, with this package, and with other libraries."""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, placement_types
from transformers import PretrainedConfig

from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config import Config
from rlhf.config.compare import ConfigDiff, ResolvedConfig
from rlhf.config.resolved import to_yaml
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.storage.file_parts import FileParts
from rlhf.storage.layout import step_dir
from rlhf.storage.shards import Shard, Shards, as_bytes

LAYER = 4 << 20
KINDS = ("weight", "exp_avg", "exp_avg_sq")


class State:
    """A simulated model in training: float32 weights and Adam's two moments, `nbytes` bytes over all ranks together.

    Each rank has an equal range of rows of every tensor, as under FSDP2. Layers have a 16 MiB weight and a small norm.
    """

    def __init__(self, nbytes: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        numel = nbytes // 4 // len(KINDS)
        sizes = [LAYER] * (numel // LAYER) + [numel % LAYER // (2 * self.world_size) * 2 * self.world_size]
        self.shapes: dict[str, tuple[int, int]] = {}
        for number, size in enumerate(sizes):
            if size:
                self.shapes[f"layers.{number}.weight"] = (size // 2, 2)
                self.shapes[f"layers.{number}.norm"] = (64 * self.world_size, 2)
        torch.manual_seed(self.rank)
        self.local = {
            (name, kind): torch.randn(rows // self.world_size, columns)
            for kind in KINDS
            for name, (rows, columns) in self.shapes.items()
        }

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.local.values())

    def _shards(self, kind: str) -> dict[str, Shard]:
        shards = {}
        for name, shape in self.shapes.items():
            local = self.local[name, kind]
            shards[name if kind == "weight" else f"{name}.{kind}"] = Shard(shape, (local.numel() * self.rank,), local)
        return shards

    def model_shards(self) -> Shards:
        return self._shards("weight")

    def optimizer_shards(self) -> Shards:
        return self._shards("exp_avg") | self._shards("exp_avg_sq")

    def extra_state(self) -> dict[str, Any]:
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        pass

    def after_load(self) -> None:
        pass

    def hf_parts(self) -> FileParts:
        return {}

    def hf_files(self) -> Mapping[str, bytes]:
        return {"config.json": b"{}"}


class Way(ABC):
    """Saves the state into an empty shared folder and loads it from there. All methods are collective."""

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most ways need no preparation
        """Do what a run does once before its first save."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Return when all bytes are durable."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load into the live tensors."""


class Raw(Way):
    """The lower bound: only the bytes, one fsynced file per rank."""

    def __init__(self, state: State) -> None:
        self._views = [as_bytes(tensor) for tensor in state.tensors]
        self._name = f"rank_{state.rank}"

    def save(self, folder: Path) -> None:
        with (folder / self._name).open("xb", buffering=0) as file:
            for view in self._views:
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        with (folder / self._name).open("rb", buffering=0) as file:
            for view in self._views:
                while view:
                    view = view[file.readinto(view) :]


class Ours(Way):
    """This package's `Checkpointer` with synchronous saves; a load is a complete resume."""

    def __init__(self, state: State) -> None:
        self._state, self._coordinator = state, Coordinator(GlooTransport())

    def prepare(self, folder: Path) -> None:
        self._checkpointer = make_checkpointer(folder, self._state, self._coordinator, async_save=False)

    def save(self, folder: Path) -> None:
        self._checkpointer.save(1)

    def load(self, folder: Path) -> None:
        assert self._checkpointer.resume()


class TorchSave(Way):
    """torch.save of each rank's tensors, plus the missing fsync; torch.load and a copy into the live tensors."""

    def __init__(self, state: State) -> None:
        self._tensors = {f"{name}.{kind}": tensor for (name, kind), tensor in state.local.items()}
        self._name = f"rank_{state.rank}.pt"

    def save(self, folder: Path) -> None:
        with (folder / self._name).open("xb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        for name, tensor in torch.load(folder / self._name, weights_only=True).items():
            self._tensors[name].copy_(tensor)


class TorchMapped(TorchSave):
    """`TorchSave` with a memory-mapped load, which reads each byte when it is copied."""

    def load(self, folder: Path) -> None:
        for name, tensor in torch.load(folder / self._name, weights_only=True, mmap=True).items():
            self._tensors[name].copy_(tensor)


def sharded(state: State) -> dict[str, Tensor]:
    """Return the state as DTensors for torch.distributed.checkpoint. Collective."""
    mesh = init_device_mesh("cpu", (state.world_size,))
    return {
        f"{name}.{kind}": DTensor.from_local(tensor, mesh, [placement_types.Shard(0)])
        for (name, kind), tensor in state.local.items()
    }


class Dcp(Way):
    """torch.distributed.checkpoint of sharded DTensors, saved and loaded in place."""

    def __init__(self, state: State) -> None:
        self._tensors = sharded(state)

    def save(self, folder: Path) -> None:
        dcp.save(self._tensors, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        dcp.load(self._tensors, checkpoint_id=folder)


class Model(nn.ParameterDict):
    """Unsharded parameters of the state's shapes, with the attributes that verl needs."""

    def __init__(self, state: State) -> None:
        super().__init__({name.replace(".", "_"): torch.zeros(shape) for name, shape in state.shapes.items()})
        self.config = PretrainedConfig()

    def can_generate(self) -> bool:
        return False


def fsync_files(folder: Path) -> None:
    """Fsync all ranks' files in `folder`, split over the ranks. Collective."""
    dist.barrier()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files[dist.get_rank() :: dist.get_world_size()]:
        with path.open("rb") as file:
            os.fsync(file.fileno())


class DeepSpeed(Way):
    """DeepSpeed's own save, plus the missing fsync, and load for ZeRO stage 2 with the same weights and moments.

    DeepSpeed writes the weights twice: unsharded, and as the optimizer's sharded master weights.
    """

    def __init__(self, state: State) -> None:
        from rlhf.backends.deepspeed import import_deepspeed

        deepspeed = import_deepspeed(torch.device("cpu"))
        model = Model(state)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters())
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        # The first step allocates the moments.
        self._engine.backward(sum(parameter.sum() for parameter in model.parameters()))
        self._engine.step()

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="1")
        fsync_files(folder)

    def load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(str(folder), tag="1")
        assert path is not None


class Verl(Way):
    """verl's own save and load of model, optimizer and extra for FSDP2 with the same weights and moments.

    The time of a save includes the missing fsync. Besides the shards verl saves random generators and the model's
    configuration. It checks no hashes and does not publish atomically.
    """

    def __init__(self, state: State) -> None:
        os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")  # verl reads this variable once, at the import
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        model = Model(state)
        fully_shard(model, mesh=init_device_mesh("cpu", (state.world_size,)))
        optimizer = torch.optim.AdamW(model.parameters())
        # The first step allocates the moments.
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self._manager = FSDPCheckpointManager(model, optimizer)

    def save(self, folder: Path) -> None:
        self._manager.save_checkpoint(str(folder), global_step=1)
        fsync_files(folder)

    def load(self, folder: Path) -> None:
        self._manager.load_checkpoint(str(folder))


def ways(state: State, skipped: Sequence[str]) -> dict[str, Way]:
    """Return every installed way whose name begins with no prefix in `skipped`, the lower bound first."""
    kinds: dict[str, Callable[[State], Way]] = {
        "raw write and fsync": Raw,
        "rlhf": Ours,
        "torch.distributed.checkpoint": Dcp,
        "torch.save, fsync": TorchSave,
        "torch.save, fsync, torch.load(mmap=True)": TorchMapped,
    }
    if find_spec("deepspeed") is not None:
        kinds["DeepSpeed, ZeRO 2, fsync"] = DeepSpeed
    if find_spec("verl") is not None:
        kinds["verl, FSDP2, fsync"] = Verl
    return {name: kind(state) for name, kind in kinds.items() if not name.lower().startswith(tuple(skipped))}


class AsyncWay(ABC):
    """Saves the state in the background into a new folder per step. All methods but `done` are collective."""

    @abstractmethod
    def start(self, step: int) -> None:
        """Start a save and return as soon as the training may continue."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the save is durable, and published if the way publishes."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the save and free disk space for the next save."""


class OursAsync(AsyncWay):
    """This package's `Checkpointer` with `checkpoint.async_save` in `root`, saving `contents` besides the defaults."""

    def __init__(self, state: State, root: Path, contents: Sequence[str] = ()) -> None:
        self._checkpointer = make_checkpointer(
            root, state, Coordinator(GlooTransport()), async_save=True, contents=contents
        )
        self._root = root

    def start(self, step: int) -> None:
        self._published = step_dir(self._root / "rlhf" / "default", step)
        self._checkpointer.save(step)

    def done(self) -> bool:
        return self._published.exists()

    def finish(self) -> None:
        self._checkpointer.finish()


class DcpAsync(AsyncWay):
    """`dcp.async_save` with its defaults, which sync every file. Writes to the final folder name from the start."""

    def __init__(self, state: State, root: Path) -> None:
        self._tensors, self._root = sharded(state), root

    def start(self, step: int) -> None:
        self._folder = self._root / f"dcp_{step}"
        written = dcp.async_save(self._tensors, checkpoint_id=self._folder)
        assert isinstance(written, Future)
        self._written = written

    def done(self) -> bool:
        return self._written.done()

    def finish(self) -> None:
        self._written.result()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder)
        dist.barrier()


def make_checkpointer(
    folder: Path,
    state: State,
    coordinator: Coordinator,
    *,
    async_save: bool,
    contents: Sequence[str] = (),
    memory: str | None = None,
) -> Checkpointer:
    """Return the checkpointer of a run in `folder` whose actor is `state`.

    The checkpointer saves `contents` besides the defaults. With the folder `memory`, it publishes a snapshot there
    after each step.
    """
    config = Config()
    config.model.path = "none"
    config.trainer.default_local_dir = str(folder)
    config.checkpoint.async_save = async_save
    config.checkpoint.contents += contents
    if memory is not None:
        config.checkpoint.memory.freq, config.checkpoint.memory.dir = 1, memory
    config.run_dir.mkdir(parents=True, exist_ok=True)
    driver = DriverState("benchmark", 10, 1.0, step=1)
    resolved = ResolvedConfig(to_yaml(config), lambda stored, release: ConfigDiff([], []))
    identity = Identity.of_run(config.backend.name, resolved.text, {}, [])
    run_state = RunState({"actor": state}, driver)  # type: ignore[dict-item]  # no adapters
    return Checkpointer(config.run_dir, config.trainer, config.checkpoint, resolved, identity, coordinator, run_state)
