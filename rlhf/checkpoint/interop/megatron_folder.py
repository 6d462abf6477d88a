"""Writes a model as Megatron's checkpoints have it, by one process without any of Megatron's code."""

from collections.abc import Iterator
from pathlib import Path

from rlhf.checkpoint.interop.excerpts import ExcerptSource
from rlhf.checkpoint.interop.megatron_model import EMBEDDING, LAYERS, OUTPUT, MegatronModel, read_model
from rlhf.checkpoint.interop.megatron_names import Excerpts, Shapes, as_megatron
from rlhf.checkpoint.interop.small_files import read_small_files
from rlhf.checkpoint.interop.source import TensorSource
from rlhf.checkpoint.interop.target import output_folder, prove
from rlhf.checkpoint.interop.torch_file import write_torch_file
from rlhf.errors import UserError
from rlhf.storage.files import WrittenFile, write_file

VOCABULARY_MULTIPLE = 128
"""Times the tensor parallel ranks: what Megatron-LM pads a vocabulary to a multiple of."""
MODEL_FILES = "huggingface"
"""Folder with config.json and tokenizer, as verl names it."""


def write_rank_folders(
    source: TensorSource, target: Path, *, tensor_ranks: int = 1, pipeline_ranks: int = 1, overwrite: bool = False
) -> None:
    """Write the tensors of `source` as `mp_rank_XX_YYY/model_states.pt` of so many ranks.

    Raises UserError when the model is none that Megatron names so, or cannot be split so.
    """
    model = _model(source)
    model.check_tensor_ranks(tensor_ranks, "--tp")
    model.check_pipeline_ranks(pipeline_ranks, "--pp")
    step = VOCABULARY_MULTIPLE * tensor_ranks
    rows = -(-model.vocabulary // step) * step
    with output_folder(target, overwrite=overwrite) as folder:
        written = []
        for rank in range(tensor_ranks):
            whole = as_megatron(model, source, rank=rank, ranks=tensor_ranks, vocabulary=rows)
            for stage in range(pipeline_ranks):
                part = _of_stage(model, *whole, stage, pipeline_ranks)
                path = f"mp_rank_{rank:02d}_{stage:03d}/model_states.pt"
                written.append(write_torch_file(folder, path, part, {"checkpoint_version": 3.0}, "model"))
        written += _write_model_files(source, folder)
        prove(folder, written)


def _model(source: TensorSource) -> MegatronModel:
    contents = source.contents
    if contents.adapter is not None:
        raise UserError("Megatron has no adapters of peft's kind. Merge it into its base first (--adapter merge).")
    if contents.model_files is None:
        raise UserError("The checkpoint does not say what model it holds. Set --hf_model_path.")
    return read_model(contents.model_files, values="score.weight" in contents.tensors)


def _of_stage(model: MegatronModel, shapes: Shapes, excerpts: Excerpts, stage: int, stages: int) -> ExcerptSource:
    """What pipeline rank `stage` of `stages` has of a tensor parallel rank's tensors, its layers counted from zero."""
    count = model.layers // stages
    names = {}
    for name in shapes:
        if name.startswith(LAYERS):
            number, _, rest = name.removeprefix(LAYERS).partition(".")
            if int(number) // count == stage:
                names[f"{LAYERS}{int(number) % count}.{rest}"] = name
        elif stage == (0 if name == EMBEDDING else stages - 1):
            names[name] = name
    if model.tied and not model.values and 0 < stage == stages - 1:
        names[OUTPUT] = EMBEDDING
    own = {name: shapes[origin] for name, origin in names.items()}
    return ExcerptSource("megatron", own, {name: excerpts[origin] for name, origin in names.items()})


def _write_model_files(source: TensorSource, folder: Path) -> Iterator[WrittenFile]:
    """The model's config, tokenizer and chat template, beside the ranks' folders."""
    assert source.contents.model_files is not None
    for name, content in read_small_files(source.contents.model_files).items():
        yield write_file(folder, f"{MODEL_FILES}/{name}", [content])
