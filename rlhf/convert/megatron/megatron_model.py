"""Maps Megatron's tensors to the rows of transformers' tensors that they consist of.

Megatron stores q, k and v of a layer in one tensor, ordered by key-value head (its queries, its key, its value), and
gate and up of a layer in another tensor. Names and orders are from megatron-core 0.16 (`GPTModel`).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf.errors import UserError
from rlhf.models.hf.small_files import LARGEST
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hf_layout import MODEL_CONFIG
from rlhf.storage.reading import parse_json, read_regular

LAYERS = "decoder.layers."
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
NORM = "decoder.final_layernorm.weight"
NO_WEIGHTS = re.compile(r"_extra_state|rotary_pos_emb\.inv_freq$")
"""Names in the model's state dict that are not weights."""
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class Run(NamedTuple):
    """Rows [row, row + rows) of transformers' tensor `name`, stored from row `at` of Megatron's tensor on."""

    name: str
    row: int
    rows: int
    at: int


@dataclass(frozen=True)
class TensorSpec:
    """Specifies a tensor of Megatron: its rows are the rows of the transformers tensors `members` (name, row count).

    Each tensor parallel rank has some of the rows, some of the columns, or the whole tensor. For a layer's tensor,
    `name` lacks the prefix `decoder.layers.N.`, and the names in `members` lack `model.layers.N.`. `alias` is the name
    in models whose layer norms are separate modules (Megatron's local specification).
    """

    name: str
    members: tuple[tuple[str, int], ...]
    columns: int | None = None
    split: Literal["rows", "columns", "none"] = "none"
    stage: Literal["layer", "first", "last"] = "layer"
    alias: str | None = None
    groups: int | None = None
    """Number of key-value heads if the members' rows alternate per head, as the rows of q, k and v do; else None."""

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.members)

    @property
    def width(self) -> int:
        return 1 if self.columns is None else self.columns

    @property
    def is_vocabulary(self) -> bool:
        """Whether the tensor has a row per token; the ranks split the rows evenly, padding included."""
        return self.name in (EMBEDDING, OUTPUT) and self.split == "rows"

    def shape(self, rows: int, ranks: int = 1) -> tuple[int, ...]:
        """Return the shape of a tensor with `rows` rows and one rank's part of the columns."""
        if self.columns is None:
            return (rows,)
        return rows, self.columns // (ranks if self.split == "columns" else 1)

    def runs(self, rank: int = 0, ranks: int = 1) -> Iterator[Run]:
        """Yield the rows that rank `rank` of `ranks` stores, in order. Use `vocabulary_run` if `is_vocabulary`."""
        if self.split != "rows":
            rank, ranks = 0, 1
        units = self.groups or ranks
        at = 0
        for unit in range(rank * units // ranks, (rank + 1) * units // ranks):
            for name, rows in self.members:
                count = rows // units
                yield Run(name, unit * count, count, at)
                at += count

    def vocabulary_run(self, rank: int, rows: int) -> Run:
        """Return the rows of rank `rank` when each rank has `rows`; rows past the vocabulary are padding."""
        ((name, vocabulary),) = self.members
        start = min(rank * rows, vocabulary)
        return Run(name, start, min(vocabulary, start + rows) - start, 0)


@dataclass(frozen=True)
class MegatronModel:
    """Sizes of a decoder that both Megatron and transformers implement: Llama, Mistral, Qwen2 and Qwen3."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int
    tied: bool
    values: bool = False
    """Whether the output is one value instead of a distribution over the vocabulary (a critic)."""

    def specs(self) -> list[TensorSpec]:
        """Return the specifications of all tensors; one specification stands for a tensor of every layer."""
        hidden, spec = self.hidden, TensorSpec
        rows = {"q": self.heads * self.head_dim, "k": self.groups * self.head_dim, "v": self.groups * self.head_dim}
        weights = tuple((f"self_attn.{name}_proj.weight", count) for name, count in rows.items())
        biases = tuple((f"self_attn.{name}_proj.bias", count) for name, count in rows.items())
        gate_up = tuple((f"mlp.{name}_proj.weight", self.intermediate) for name in ("gate", "up"))
        norm, mlp_norm = (("input_layernorm.weight", hidden),), (("post_attention_layernorm.weight", hidden),)
        output, down = (("self_attn.o_proj.weight", hidden),), (("mlp.down_proj.weight", hidden),)
        tokens, final = (("model.embed_tokens.weight", self.vocabulary),), (("model.norm.weight", hidden),)
        specs = [
            spec("self_attention.linear_qkv.layer_norm_weight", norm, alias="input_layernorm.weight"),
            spec("self_attention.linear_qkv.weight", weights, hidden, "rows", groups=self.groups),
            spec("self_attention.linear_proj.weight", output, rows["q"], "columns"),
            spec("mlp.linear_fc1.layer_norm_weight", mlp_norm, alias="pre_mlp_layernorm.weight"),
            spec("mlp.linear_fc1.weight", gate_up, hidden, "rows"),
            spec("mlp.linear_fc2.weight", down, self.intermediate, "columns"),
            spec(EMBEDDING, tokens, hidden, "rows", stage="first"),
            spec(NORM, final, stage="last"),
        ]
        if self.model_type == "qwen2":
            specs.append(spec("self_attention.linear_qkv.bias", biases, None, "rows", groups=self.groups))
        if self.model_type == "qwen3":
            norms = {name: ((f"self_attn.{name}_norm.weight", self.head_dim),) for name in "qk"}
            specs += [spec(f"self_attention.{name}_layernorm.weight", member) for name, member in norms.items()]
        if self.values:
            specs.append(spec(OUTPUT, (("score.weight", 1),), hidden, stage="last"))
            specs.append(spec("output_layer.bias", (("score.bias", 1),), stage="last"))
        elif not self.tied:
            specs.append(spec(OUTPUT, (("lm_head.weight", self.vocabulary),), hidden, "rows", stage="last"))
        return specs

    def check_tensor_ranks(self, ranks: int, what: str, remedy: str = "") -> None:
        """Raise UserError unless the model splits over `ranks` tensor parallel ranks. The message calls the setting
        `what`, and lists the possible numbers if `remedy` is empty."""
        divided = {
            "attention heads": self.heads,
            "key-value heads": self.groups,
            "intermediate units (intermediate_size)": self.intermediate,
        }
        _check_divisor(divided, ranks, what, remedy)

    def check_pipeline_ranks(self, ranks: int, what: str) -> None:
        """Raise UserError unless the layers split over `ranks` pipeline parallel ranks."""
        _check_divisor({"layers": self.layers}, ranks, what)


def _check_divisor(counts: Mapping[str, int], ranks: int, what: str, remedy: str = "") -> None:
    for name, count in counts.items():
        if ranks < 1 or count % ranks:
            largest = math.gcd(*counts.values())
            possible = [str(number) for number in range(1, largest + 1) if largest % number == 0]
            remedy = remedy or f"Set {what} to one of {', '.join(possible)}."
            raise UserError(f"{what}={ranks} does not divide the model's {count} {name}. {remedy}")


def layer_name(layer: int, spec: TensorSpec) -> str:
    return f"{LAYERS}{layer}.{spec.name}" if spec.stage == "layer" else spec.name


def member_name(layer: int, spec: TensorSpec, name: str) -> str:
    return f"model.layers.{layer}.{name}" if spec.stage == "layer" else name


def read_model(folder: Path, *, values: bool = False) -> MegatronModel:
    """Read the model of config.json in `folder`; raises UserError for an unsupported model."""
    path = folder / MODEL_CONFIG
    try:
        config: dict[str, Any] = parse_json(read_regular(path, LARGEST), MODEL_CONFIG)
        model_type = config["model_type"]
    except (OSError, DamagedCheckpoint, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a config.json of transformers: {error}. Set --hf_model_path.") from None
    if model_type not in MODEL_TYPES:
        known = f"{', '.join(MODEL_TYPES[:-1])} and {MODEL_TYPES[-1]}"
        raise UserError(f"model_type={model_type} ({path}): conversion to or from Megatron supports {known} only.")
    biased = ("attention_bias",) if model_type != "qwen2" else ()
    for setting in (*biased, "mlp_bias"):
        if config.get(setting):
            raise UserError(
                f"{setting}=true ({path}) is not supported by the conversion of {model_type} to or from Megatron."
            )
    try:
        for name in ("num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"):
            if not isinstance(value := config[name], int) or value < 1:
                raise UserError(f"{name}={value} ({path}): must be a whole number of at least 1. Correct the file.")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return MegatronModel(
            model_type=model_type,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            values=values,
        )
    except KeyError as error:
        raise UserError(f"{path} lacks {error}. Set --hf_model_path to a folder with the whole config.json.") from None
