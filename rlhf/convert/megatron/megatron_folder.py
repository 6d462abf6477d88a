"""Writes a model as a Megatron checkpoint, in one process without Megatron's code."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlhf.convert.dcp.dcp_folder import as_dcp
from rlhf.convert.dcp.dcp_writer import write_dcp
from rlhf.convert.megatron.megatron_model import EMBEDDING, LAYERS, OUTPUT, MegatronModel, read_model
from rlhf.convert.megatron.megatron_names import as_megatron
from rlhf.convert.torch_file import torch_save_bytes, write_torch_file
from rlhf.errors import UserError
from rlhf.models.hf.hf_plan import Progress
from rlhf.models.hf.named_tensors import JoinedTensor, NamedTensors
from rlhf.models.hf.small_files import read_small_files
from rlhf.models.hf.source import TensorInfo, TensorSource
from rlhf.storage.files import WrittenFile, write_file, write_json

VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this number times the tensor parallel ranks."""
OF_ATTENTION = ("linear_qkv", "linear_proj", "core_attention", "q_layernorm", "k_layernorm")
MODULES = (*(f"self_attention.{name}" for name in OF_ATTENTION), "mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer for which Megatron saves an extra state beside the weights, also without Transformer Engine."""
MODEL_FILES = "huggingface"
"""Folder with config.json and tokenizer, as verl names it."""


MEGATRON_LAYOUTS = ("torch_dist", "mp_rank")
DISTRIBUTED = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
DISTRIBUTED |= {"common_backend": "torch", "common_backend_version": 1}


def write_megatron_folder(
    source: TensorSource,
    folder: Path,
    *,
    tensor_ranks: int = 1,
    pipeline_ranks: int = 1,
    layout: str = "torch_dist",
    dtype: str | None = None,
    progress: Progress = lambda count: None,
) -> list[WrittenFile]:
    """Write the tensors of `source` into the empty `folder` as a Megatron checkpoint, with the model's config and
    tokenizer in `huggingface/`. Return the written files with hashes, computed in memory before the write.

    megatron-core's `dist_checkpointing` loads `torch_dist` at any number of ranks; `mp_rank` has one file per rank.
    Raises UserError if no Megatron names are known for the model, or if the model cannot be split over the ranks
    (checked for both layouts). `dtype` (float32, ...) converts the weights; None keeps each dtype.
    """
    model = _model(source)
    model.check_tensor_ranks(tensor_ranks, "--tp")
    model.check_pipeline_ranks(pipeline_ranks, "--pp")
    converted = as_dcp(source, dtype, moments=False)
    if layout == "torch_dist":
        written = _write_distributed(model, converted, folder, progress)
    else:
        written = _write_ranks(model, converted, folder, tensor_ranks, pipeline_ranks, progress)
    return [*written, *_write_model_files(source, folder)]


def _write_distributed(
    model: MegatronModel, source: TensorSource, folder: Path, progress: Progress
) -> list[WrittenFile]:
    groups: defaultdict[str, list[JoinedTensor]] = defaultdict(list)
    for name, tensor in as_megatron(model, source).items():
        in_layer = name.startswith(LAYERS)
        groups[LAYERS + name.removeprefix(LAYERS).partition(".")[2] if in_layer else name].append(tensor)
    tensors = {name: _stacked(group) if name.startswith(LAYERS) else group[0] for name, group in groups.items()}
    written = write_dcp(folder, NamedTensors("megatron", tensors), objects=_extra_states(model), progress=progress)
    # Megatron stores here what all ranks share, such as the arguments of a run. This checkpoint has nothing to share.
    written.append(write_file(folder, "common.pt", torch_save_bytes({}, iter(()))))
    # Write this file last, as megatron-core does: its presence makes the folder a checkpoint.
    return [*written, write_json(folder, "metadata.json", DISTRIBUTED)]


def _stacked(tensors: Sequence[JoinedTensor]) -> JoinedTensor:
    info = TensorInfo((len(tensors), *tensors[0].info.shape), tensors[0].info.dtype)
    return JoinedTensor(info, [piece for tensor in tensors for piece in tensor.pieces])


def _extra_states(model: MegatronModel) -> dict[str, bytes]:
    """Return the extra state that Megatron expects for each module: None, because the model has no FP8 state."""
    nothing = b"".join(torch_save_bytes([None], iter(())))
    layers = range(model.layers)
    names = [f"{LAYERS}{module}._extra_state/shard_{layer}_{model.layers}" for layer in layers for module in MODULES]
    return dict.fromkeys([*names, "decoder.final_layernorm._extra_state/shard_0_1"], nothing)


def _write_ranks(
    model: MegatronModel, source: TensorSource, folder: Path, ranks: int, stages: int, progress: Progress
) -> list[WrittenFile]:
    step = VOCABULARY_MULTIPLE * ranks
    rows = -(-model.vocabulary // step) * step
    written = []
    for rank in range(ranks):
        whole = as_megatron(model, source, rank=rank, ranks=ranks, vocabulary=rows)
        for stage in range(stages):
            part = NamedTensors("megatron", _of_stage(model, whole, stage, stages))
            path = f"mp_rank_{rank:02d}_{stage:03d}/model_states.pt"
            written.append(write_torch_file(folder, path, part, {"checkpoint_version": 3.0}, "model", progress))
    return written


def _model(source: TensorSource) -> MegatronModel:
    contents = source.contents
    if contents.adapter is not None:
        raise UserError("Megatron can't load peft adapters. Merge the adapter into its base first (--adapter merge).")
    if contents.model_files is None:
        raise UserError("The checkpoint has no config.json. Set --hf_model_path.")
    return read_model(contents.model_files, values="score.weight" in contents.tensors)


def _of_stage(
    model: MegatronModel, whole: Mapping[str, JoinedTensor], stage: int, stages: int
) -> dict[str, JoinedTensor]:
    """Return the tensors of pipeline rank `stage`, out of all tensors of one tensor parallel rank (`whole`). Each stage
    numbers its layers from 0."""
    count = model.layers // stages
    found = {}
    for name, tensor in whole.items():
        if name.startswith(LAYERS):
            number, _, rest = name.removeprefix(LAYERS).partition(".")
            if int(number) // count == stage:
                found[f"{LAYERS}{int(number) % count}.{rest}"] = tensor
        elif stage == (0 if name == EMBEDDING else stages - 1):
            found[name] = tensor
    if model.tied and not model.values and 0 < stage == stages - 1:
        found[OUTPUT] = whole[EMBEDDING]
    return found


def _write_model_files(source: TensorSource, folder: Path) -> Iterator[WrittenFile]:
    assert source.contents.model_files is not None
    for name, content in read_small_files(source.contents.model_files).items():
        yield write_file(folder, f"{MODEL_FILES}/{name}", [content])
