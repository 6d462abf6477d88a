"""Finds the architecture that a config.json describes, and compares it with the tensors of a checkpoint."""

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from rlhf.errors import UserError
from rlhf.models.fused_experts import FileConversions, fuse_experts, parts_in_files
from rlhf.models.hf.source import TensorInfo
from rlhf.models.loading import quiet_transformers
from rlhf.models.skeleton import headers_of, stand_ins
from rlhf.models.token_values import value_class
from rlhf.storage.file_parts import FileParts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers with its configuration, and the names of its weights."""

    kind: Any
    config: Any
    tied: dict[str, str]
    """Name of a tied tensor -> name of the tensor that it copies."""
    parameters: tuple[str, ...]
    """Names of the weights in the model's order, without tied copies."""
    parts: FileParts
    """Weight -> its tensors in files, only for weights that files store split or under other names."""

    def copies_in(self, tensors: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (tied tensor, its source) for each tied pair in `tensors`, under the model's or the files' names."""
        in_files = {name: of_name[0].name for name, of_name in self.parts.items()}
        for pair in self.tied.items():
            for name, source in {pair, tuple(in_files.get(each, each) for each in pair)}:
                if name in tensors and source in tensors:
                    yield name, source


def architecture_of(model_files: Path, *, value_model: bool = False, tied: bool | None = None) -> Architecture | None:
    """Return the architecture that a folder's config.json names, else the causal LM of its model type.

    Return None, with a warning, if config.json cannot be read or transformers has no class for it.

    Args:
        value_model: return the class with one output per token.
        tied: overrides the configuration's `tie_word_embeddings`.

    Raises:
        UserError: with `value_model`, if the architecture has no value head.
    """
    try:
        config = AutoConfig.from_pretrained(model_files, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: tensors are not compared with config.json (%s).", model_files, str(error).split("\n")[0])
        return None
    if tied is not None:
        config.tie_word_embeddings = tied
    kind = _value_kind(model_files, config) if value_model else _kind(config)
    if kind is None:
        log.warning("%s: tensors are not compared with config.json (no class for %s).", model_files, config.model_type)
        return None
    with torch.device("meta"):
        model: PreTrainedModel = kind(copy.deepcopy(config))
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True)
    copies = {name: str(source) for name, source in pairs.items()}
    parameters = tuple(name for name, _ in model.named_parameters())
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return Architecture(kind, config, copies, parameters, parts_in_files(shapes, FileConversions.of(model)))


def _kind(config: Any) -> Any:
    for name in getattr(config, "architectures", None) or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return kind
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def _value_kind(model_files: Path, config: Any) -> Any:
    config.num_labels = 1
    config.classifier_dropout = 0.0
    found = value_class(config)
    if found is None:
        raise UserError(
            f"--is-value-model: {config.model_type} of {model_files} has no value head in transformers. Remove the "
            "option."
        )
    kind: Any = found[0]
    if kind is AutoModelForTokenClassification:
        kind = transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)]
    return kind


def check_fit(
    where: Path, tensors: Mapping[str, TensorInfo], architecture: Architecture, model_files: Path, value_model: bool
) -> None:
    """Raise UserError unless `tensors`, of the checkpoint `where`, are exactly the architecture's weights.

    The suggested remedy depends on `value_model`: whether the user asked for a value model.
    """
    # Fuse the experts' headers here: transformers would allocate memory for the fused weights.
    headers, _ = fuse_experts(headers_of(tensors), architecture.config)
    options: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True, "dtype": torch.float32}
    with quiet_transformers():
        _, found = architecture.kind.from_pretrained(
            None, config=copy.deepcopy(architecture.config), state_dict=stand_ins(headers), **options
        )
    expected = f"config.json of {model_files} ({architecture.kind.__name__})"
    remedy = "Name the right folder with --hf_model_path"
    for names, what in (
        (found["unexpected_keys"], "has tensors that {} does not know"),
        (found["missing_keys"], "lacks tensors that {} asks for"),
    ):
        if names:
            problem = f"{what.format(expected)}, such as {min(names)} ({len(names)} in all)"
            raise UserError(f"{where}: {problem}. {remedy}{_hint(names, value_model)}.")
    for name, here, wanted in sorted(found["mismatched_keys"]):
        raise UserError(f"{where}: {name} has the shape {list(here)}; {expected} asks for {list(wanted)}. {remedy}.")


def _hint(names: Iterable[str], value_model: bool) -> str:
    """Return a hint for the end of the remedy, from the `names` of the tensors that do not fit.

    Only `merge` has the options that the hints name.
    """
    if value_model:
        return "; the checkpoint was read as a value model, because of --is-value-model or the role critic"
    if any(name.startswith(("score.", "classifier.", "v_head.")) for name in names):
        return "; for a value model, use merge with --is-value-model"
    if "lm_head.weight" in names:
        return "; if the head is tied to the embedding, use merge with --tie-word-embedding"
    return ""
