"""Finds LoRA adapters of peft among tensors, and keeps them or merges them into their base."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf.errors import UserError
from rlhf.models.adapter_config import PREFIX, unsupported_settings
from rlhf.models.hf.source import ReadableTensor, TensorInfo
from rlhf.models.merged_weight import KINDS, merged_weight

KEEP, MERGE = "keep", "merge"
FACTOR = re.compile(rf"(.+)\.({'|'.join(KINDS)})(?:\.weight)?")
REPLACED = re.compile(r"\.(?:modules_to_save|base_layer)(?=\.)")
REPEATS, REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
MOST_REPEATS = 3
WITH_NAME = re.compile(r"\.(lora_[A-Za-z_]+|modules_to_save)\.([^.]+)(?=\.|$)")


@dataclass
class Adapter:
    """Adapter tensors by peft's names (`base_model.model.X.lora_A.weight`), and settings; messages name `path`."""

    path: Path
    config: Mapping[str, Any]
    tensors: dict[str, ReadableTensor]


def adapter_choice(choice: str | None, path: Path) -> str:
    """Return `choice`, the value of `--adapter`. Raise UserError, which names `path`, unless it is KEEP or MERGE."""
    if choice in (KEEP, MERGE):
        return str(choice)
    raise UserError(
        f"{path} has a LoRA adapter: its base model alone is not what was trained. Set --adapter={MERGE} to merge "
        f"the adapter into its base, or --adapter={KEEP} to keep the adapter alone."
    )


def split_adapter(
    tensors: Mapping[str, ReadableTensor], path: Path
) -> tuple[dict[str, ReadableTensor], dict[str, ReadableTensor]]:
    """Split a PeftModel's state dict: the base's tensors by transformers' names, the adapter's by peft's names.

    Raises:
        UserError: the state dict has several adapters.
    """
    base, adapter, found = {}, {}, set()
    for name, tensor in tensors.items():
        if ".original_module." in name:
            base[_plain(name.replace(".original_module", ""))] = tensor
        elif match := WITH_NAME.search(name):
            found.add(match[2])
            adapter[name[: match.end(1)] + name[match.end() :]] = tensor
        else:
            base[_plain(name)] = tensor
    if len(found) > 1:
        raise UserError(f"{path} has several adapters: {', '.join(sorted(found))}. Save it with one adapter.")
    return base, adapter


def is_adapted(names: Mapping[str, Any]) -> bool:
    return any(".lora_" in name for name in names)


def merged(base: Mapping[str, ReadableTensor], adapter: Adapter) -> dict[str, ReadableTensor]:
    """Return the tensors of the base with the adapter merged.

    A weight with factors becomes W + scaling * B A, with DoRA's magnitude if any. A read computes the weight in float32
    and rounds once to W's type. Fully trained modules (`modules_to_save`) replace the base's.

    Raises:
        UserError: the adapter is of an unsupported kind, incomplete or without a finite scale, or fits another base.
    """
    _check(adapter)
    result, factors = dict(base), dict[str, dict[str, ReadableTensor]]()
    for name, tensor in adapter.tensors.items():
        if match := FACTOR.fullmatch(name):
            factors.setdefault(_plain(match[1]) + ".weight", {})[match[2]] = tensor
        elif ".lora_" in name:
            raise UserError(
                f"{adapter.path} has {name}, an unsupported part of an adapter. Merge the adapter with peft."
            )
        else:
            plain = _plain(REPLACED.sub("", name))
            _check_base(adapter, plain, base, tensor.info.shape)
            result[plain] = tensor
    for weight, pair in factors.items():
        result[weight] = _with_factors(adapter, weight, base, pair)
    return result


def _plain(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def _check(adapter: Adapter) -> None:
    config = adapter.config
    kind = ["peft_type"] if config.get("peft_type") not in ("LORA", None) else []
    if unsupported := [*kind, *unsupported_settings(config)]:
        found = ", ".join(f"{setting}={config[setting]}" for setting in unsupported)
        raise UserError(
            f"{adapter.path} is an adapter with {found}, which is not merged here. Merge it with peft "
            f"(merge_and_unload), or set --adapter={KEEP}."
        )


def _check_base(adapter: Adapter, name: str, base: Mapping[str, ReadableTensor], shape: tuple[int, ...]) -> None:
    if name not in base or base[name].info.shape != shape:
        problem = f"has shape {base[name].info.shape} there, not {shape}" if name in base else "is missing there"
        raise UserError(
            f"{adapter.path} does not fit this base: {name} {problem}. Set --hf_model_path to the adapter's base."
        )


def _with_factors(
    adapter: Adapter, weight: str, base: Mapping[str, ReadableTensor], pair: Mapping[str, ReadableTensor]
) -> "MergedTensor":
    embedding = "lora_embedding_A" in pair
    kind = "lora_embedding_" if embedding else "lora_"
    needed = {f"{kind}A", f"{kind}B"} | ({"lora_magnitude_vector"} if adapter.config.get("use_dora") else set())
    if needed != pair.keys():
        raise UserError(
            f"{adapter.path} has {', '.join(pair)} of {weight}, but its adapter_config.json needs "
            f"{', '.join(sorted(needed))}. Restore the adapter."
        )
    a, b = pair[f"{kind}A"], pair[f"{kind}B"]
    transposed = embedding or bool(adapter.config.get("fan_in_fan_out"))
    shape = (b.info.shape[0], a.info.shape[-1])
    _check_base(adapter, weight, base, shape[::-1] if transposed else shape)
    return MergedTensor(base[weight], pair, _scaling(adapter, weight, a.info.shape[0]), transposed)


def _scaling(adapter: Adapter, weight: str, rank: int) -> float:
    """Return the factor of B A, as in peft: alpha / r, or alpha / sqrt(r) with rsLoRA; alpha may differ by module."""
    config, module = adapter.config, weight.removesuffix(".weight")
    alpha: Any = config.get("lora_alpha")
    try:
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            if REPEATED_GROUP.search(pattern) or len(REPEATS.findall(pattern)) > MOST_REPEATS:
                raise ValueError("a pattern that may take forever to match")
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        scale = float(alpha)
    except (AttributeError, OverflowError, TypeError, ValueError, re.error):
        scale = math.nan
    if not math.isfinite(scale):  # NaN would fill the merged weight
        raise UserError(
            f"{adapter.path} has lora_alpha={config.get('lora_alpha')!r} and alpha_pattern="
            f"{config.get('alpha_pattern')!r}, which give {weight} no scale. A pattern may have up to {MOST_REPEATS} "
            "of the signs * + {, and none after a group. Restore its adapter_config.json."
        )
    return scale / (math.sqrt(rank) if config.get("use_rslora") else rank)


@dataclass
class MergedTensor:
    """A weight with its factors merged on read; the whole weight stays in memory until its last range is read."""

    base: ReadableTensor
    factors: Mapping[str, ReadableTensor]
    scaling: float
    transposed: bool
    _whole: Tensor | None = field(default=None, repr=False)

    @property
    def info(self) -> TensorInfo:
        return self.base.info

    def read(self, start: int, stop: int) -> Tensor:
        whole = self._merge() if self._whole is None else self._whole
        # Callers read ranges in ascending order.
        self._whole = None if stop == self.info.numel else whole
        return whole[start:stop].clone()

    def _merge(self) -> Tensor:
        factors = {name: _whole(tensor) for name, tensor in self.factors.items()}
        merged = merged_weight(_whole(self.base), factors, self.scaling, transposed=self.transposed)
        return merged.to(self.base.info.dtype).reshape(-1)


def _whole(tensor: ReadableTensor) -> Tensor:
    return tensor.read(0, tensor.info.numel).view(tensor.info.shape)
