"""Makes a checkpoint of a random Llama for benchmarks of checkpoint commands."""

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rlhf
from rlhf.backends.fsdp2 import chunk_of
from rlhf.checkpoint.commit.manifest import Manifest, describe, write_manifest
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.numerics import NUMERICS
from rlhf.storage.boxes import Box
from rlhf.storage.files import WrittenFile, write_file, write_json
from rlhf.storage.layout import CONFIG, DRIVER_STATE, INDEX, rank_file
from rlhf.storage.shard_index import FileShards, merge_shares
from rlhf.storage.shards import Shard, Shards, tensor_table, write_shards

TINY_POLICY = Path(rlhf.__file__).parent / "models" / "tiny_policy"
RANKS, FOLDER = 2, "actor/model"


def make_checkpoint(root: Path, nbytes: int) -> Path:
    """Make a checkpoint with about `nbytes` bytes of weights, and the starting model of its run, below `root`."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 32_000}
    layers = max(1, round((nbytes / 4 - 2 * 32_000 * 1024) / (16 << 20)))
    config = LlamaConfig(num_hidden_layers=layers, **shape)  # type: ignore[arg-type]
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    base = shutil.copytree(TINY_POLICY, root / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(base)
    checkpoint = root / "global_step_1"
    written: list[WrittenFile] = []
    shares: list[FileShards] = []
    for rank in range(RANKS):
        shards = _shards(shapes, rank)
        files, share = write_shards(checkpoint, FOLDER, rank_file(rank), shards)
        written, shares = written + files, [*shares, share]
    index = merge_shares(tensor_table(shards), shares)
    written.append(write_file(checkpoint, f"{FOLDER}/{INDEX}", [index]))
    settings = Config()
    settings.model.path = str(base)
    written.append(write_file(checkpoint, CONFIG, [to_yaml(settings).encode()]))
    written.append(write_json(checkpoint, DRIVER_STATE, DriverState("r", 1, 1.0, step=1).state_dict()))
    manifest = Manifest(1, RANKS, "fsdp2", ["model"], ["actor"], "", {}, "2026-01-01", {}, [1] * RANKS, NUMERICS)
    write_manifest(checkpoint, Manifest(**vars(manifest) | {"files": describe(written)}))
    return checkpoint


def _shards(shapes: dict[str, tuple[int, ...]], rank: int) -> Shards:
    torch.manual_seed(rank)
    shards = {}
    for name, shape in shapes.items():
        box = chunk_of(Box((0,) * len(shape), shape), 0, rank, RANKS)
        shards[name] = Shard(shape, box.offsets, torch.randn(box.sizes))
    return shards
