"""Saves and loads checkpoints with megatron-core on CPUs, on four gloo ranks: `megatron_ranks.py FOLDER make|load`.

`make` writes for each architecture a random model of one rank with its logits (`1x1x1`) and the same model in other
splits (tensor x pipeline x virtual pipeline ranks), each as `dist` and as `ranks`. `load` writes to `loaded.json` the
first tensor, if any, that Megatron loads differently from `ours`. `redirect` replaces megatron-core's needless requests
for a GPU. megatron-core spawns a process that imports this module, so keep its imports light.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORLD = 4
SPLITS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 107,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
TIED = {"llama": False, "qwen2": True, "qwen3": False}
CASES = {"llama": [SPLITS[0], SPLITS[-1]], "qwen2": SPLITS, "qwen3": [SPLITS[0], SPLITS[3]]}
TOKENS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38]]


def redirect() -> None:
    """Replace requests for a GPU by the CPU."""
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.set_device = lambda *_, **__: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment]
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def build(architecture: str, split: tuple[int, int, int]) -> list[Any]:
    """Build this rank's part of a model, with a module per virtual pipeline stage."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    tensor, pipeline, virtual = split
    stages = virtual if virtual > 1 else None
    config = TransformerConfig(
        num_layers=SIZES["num_hidden_layers"],
        hidden_size=SIZES["hidden_size"],
        ffn_hidden_size=SIZES["intermediate_size"],
        num_attention_heads=SIZES["num_attention_heads"],
        num_query_groups=SIZES["num_key_value_heads"],
        kv_channels=SIZES["head_dim"],
        layernorm_epsilon=SIZES["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture == "qwen2",
        qk_layernorm=architecture == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    models = []
    for stage in range(virtual):
        number = {"ignore_virtual": False, "vp_stage": stage} if stages else {}
        model = GPTModel(
            config,
            spec,
            vocab_size=128 * tensor,
            max_sequence_length=SIZES["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(**number),
            post_process=parallel_state.is_pipeline_last_stage(**number),
            share_embeddings_and_output_weights=TIED[architecture],
            position_embedding_type="rope",
            rotary_base=10000,
            vp_stage=stage if stages else None,
        )
        models.append(model.eval())
    return models


def named(models: list[Any], state: str) -> dict[str, Any]:
    """Return `state` ("state_dict" or "sharded_state_dict") of the modules under Megatron-LM's names."""
    names = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
    return {name: getattr(model, state)() for name, model in zip(names, models, strict=True)}


@contextlib.contextmanager
def parallel(split: tuple[int, int, int]) -> Iterator[None]:
    """Create Megatron's process groups in the block."""
    from megatron.core import parallel_state

    tensor, pipeline, virtual = split
    stages = virtual if virtual > 1 else None
    parallel_state.initialize_model_parallel(tensor, pipeline, virtual_pipeline_model_parallel_size=stages)
    yield
    parallel_state.destroy_model_parallel()


def make_first(architecture: str, folder: Path) -> None:
    """Write the random model, its logits, and its weights with the other contents of Megatron-LM's file."""
    import random
    from argparse import Namespace

    import numpy as np
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import RerunDiagnostic, RerunMode, RerunState
    from megatron.core.transformer.enums import AttnBackend

    torch.manual_seed(5)
    models = build(architecture, (1, 1, 1))
    with torch.no_grad():
        for name, parameter in models[0].named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
            if "word_embeddings" in name or name == "output_layer.weight":
                parameter[SIZES["vocab_size"] :] = 0.0
        tokens = torch.tensor(TOKENS)
        places = torch.arange(tokens.shape[1])[None]
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        logits = models[0](tokens, places, mask)
    save(models, folder / "1x1x1")
    if torch.distributed.get_rank() == 0:
        torch.save(logits[..., : SIZES["vocab_size"]].clone(), folder / "logits.pt")
        states = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
        beside = {
            "args": Namespace(backend=AttnBackend.auto, type=ModelType.encoder_or_decoder, cache=Path("x")),
            "optimizer_config": OptimizerConfig(),
            "rerun": [RerunMode.DISABLED, RerunState.NOT_RUNNING_YET, RerunDiagnostic.CORRECT_RESULT],
            "rng_state": states,
            "iteration": 4,
            "checkpoint_version": 3.0,
        }
        place = folder / "1x1x1" / "ranks" / "mp_rank_00"
        (place.parent / "mp_rank_00_000").rename(place)
        (place / "model_states.pt").unlink()
        torch.save(beside | named(models, "state_dict"), place / "model_optim_rng.pt")


def save(models: list[Any], folder: Path) -> None:
    """Save the modules with `dist_checkpointing`, and each rank's weights in a file."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    (folder / "dist").mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(named(models, "sharded_state_dict"), str(folder / "dist"))
    if parallel_state.get_data_parallel_rank() == 0:
        tensor = parallel_state.get_tensor_model_parallel_rank()
        pipeline = parallel_state.get_pipeline_model_parallel_rank()
        place = folder / "ranks" / f"mp_rank_{tensor:02d}_{pipeline:03d}"
        place.mkdir(parents=True)
        torch.save(named(models, "state_dict"), place / "model_states.pt")
    torch.distributed.barrier()


def load(architecture: str, split: tuple[int, int, int], folder: Path) -> list[Any]:
    """Return the modules with weights loaded by `dist_checkpointing` from `folder`."""
    import torch
    from megatron.core import dist_checkpointing

    torch.manual_seed(6)
    models = build(architecture, split)
    for name, state in dist_checkpointing.load(named(models, "sharded_state_dict"), str(folder)).items():
        if name.startswith("model"):
            models[int(name[5:] or 0)].load_state_dict(state)
    return models


def first_difference(one: list[Any], other: list[Any]) -> str | None:
    """Return the first tensor that differs between two lists of modules."""
    import torch

    for left, right in zip(one, other, strict=True):
        for name, tensor in left.state_dict().items():
            if tensor is not None and not torch.equal(tensor, right.state_dict()[name]):
                return name
    return None


def make(root: Path) -> None:
    """Write every case."""
    for architecture, splits in CASES.items():
        folder = root / architecture
        for split in splits:
            with parallel(split):
                if split == SPLITS[0]:
                    make_first(architecture, folder)
                else:
                    save(load(architecture, split, folder / "1x1x1" / "dist"), folder / "x".join(map(str, split)))


def compare(root: Path, differences: dict[str, str | None]) -> None:
    """Load every case from Megatron's folder and from ours, and note differences."""
    import torch

    for architecture, splits in CASES.items():
        folder = root / architecture
        for split in splits:
            with parallel(split):
                models = load(architecture, split, folder / "1x1x1" / "dist")
                found = first_difference(models, load(architecture, split, folder / "ours"))
                every: list[Any] = [None] * WORLD
                torch.distributed.all_gather_object(every, found)
                differences[f"{architecture} {'x'.join(map(str, split))}"] = next(filter(None, every), None)


def rank(number: int, root: Path, work: str) -> None:
    import torch

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(root / f"store_{work}"), WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=number, world_size=WORLD)
    differences: dict[str, str | None] = {}
    if work == "make":
        make(root)
    else:
        compare(root, differences)
    if number == 0:
        (root / "loaded.json").write_text(json.dumps(differences))
    torch.distributed.destroy_process_group()


def main(root: Path, work: str) -> None:
    """Run `make` or `load` in `root`."""
    import torch.multiprocessing

    redirect()
    torch.multiprocessing.start_processes(rank, (root, work), WORLD, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
