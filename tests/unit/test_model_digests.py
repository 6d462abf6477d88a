"""Digests of a vLLM model's packed and tied weights, and of heads that several devices have; tested without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.rollout.vllm.model_digests import (
    check_unsent,
    model_digests,
    record_packing,
    unsent_digests,
    weight_check,
)
from rlhf.rollout.weight_digest import WeightsMismatch, digest, read_digests
from tests.support.refusals import says

FP32 = torch.float32


class Packing:
    """Computes with a packed copy like vLLM on a CPU, which keeps only this copy of a linear layer."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().clone()
        if not self._keep:
            layer.weight = nn.Parameter(torch.empty(0))


def layer(weight: Tensor, keep: bool = False, **attributes: Any) -> Any:
    module = nn.Linear(*weight.shape)
    module.weight = nn.Parameter(weight)
    module.bias = None
    module.quant_method = Packing(keep)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def load(module: Any, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight)
    module.quant_method.process_weights_after_loading(module)


def of(**weights: Tensor) -> Any:
    return read_digests({name.replace("__", "."): digest(weight, FP32) for name, weight in weights.items()})


def test_packed_weights_are_those_of_the_last_packing_and_unknown_before_it():
    model = nn.ModuleDict({"down": layer(torch.randn(4, 4)), "norm": nn.LayerNorm(4, bias=False)})
    model["down"].quant_method.process_weights_after_loading(model["down"])
    record_packing(model, FP32)
    record_packing(model, FP32)
    assert model_digests(model, FP32) == of(norm__weight=torch.ones(4))
    for _ in range(2):
        weight = torch.randn(4, 4)
        load(model["down"], weight)
        assert model_digests(model, FP32) == of(norm__weight=torch.ones(4), down__weight=weight)


def test_a_tied_head_counts_once_and_must_be_packed_anew():
    old, new = torch.randn(6, 4), torch.randn(6, 4)
    model = nn.ModuleDict({"embed": layer(old, keep=True), "head": layer(old, keep=True)})
    record_packing(model, FP32)
    for weight, packs in ((old, True), (new, False), (new, True)):
        load(model["embed"], weight)
        model["head"].weight = model["embed"].weight
        if packs:
            model["head"].quant_method.process_weights_after_loading(model["head"])
        assert model_digests(model, FP32) == of(embed__weight=weight if packs else old)


def test_heads_that_several_devices_have_count_once():
    """Each of two devices has one of two query heads, and both have the one key-value head; heads have size 3."""
    q, kv, bias = torch.randn(6, 4), torch.randn(6, 4), torch.randn(12)
    devices = []
    for rank in range(2):
        heads: dict[str, Any] = {"num_kv_head_replicas": 2, "tp_rank": rank, "num_heads": 1, "head_size": 3}
        module = layer(torch.empty(9, 4), **heads)
        module.bias = nn.Parameter(torch.cat([bias[3 * rank : 3 * rank + 3], bias[6:]]))
        model = nn.ModuleDict({"qkv": module})
        record_packing(model, FP32)
        load(module, torch.cat([q[3 * rank : 3 * rank + 3], kv]))
        devices.append(model_digests(model, FP32))
    model.packed_modules_mapping = {"qkv": ["q", "kv"]}
    model.hf_to_vllm_mapper = SimpleNamespace(map_name=lambda name: name.removeprefix("model."))
    sent = of(model__q__weight=q, model__kv__weight=kv, model__q__bias=bias[:6], model__kv__bias=bias[6:])
    weight_check(model, exact=True).check(sent, devices, "step 1")


def test_buffers_count_that_are_sent_and_no_sleep_may_change_one():
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3))
    model.register_buffer("bias", torch.randn(4))
    model.register_buffer("table", torch.randn(2, 6).bfloat16(), persistent=False)
    model.register_buffer("flags", torch.tensor([True, False]))
    assert model_digests(model, FP32) == of(weight=model.weight)
    check = weight_check(model, exact=True)
    sent = of(weight=model.weight, bias=model.bias)
    assert model_digests(model, FP32, check.names(sent)) == sent
    before = unsent_digests(model)
    check_unsent(before, unsent_digests(model), "step 1")
    for name in ("bias", "table", "flags"):
        buffer = model.get_buffer(name)
        buffer.copy_(buffer.clone().flip(-1))
        with pytest.raises(WeightsMismatch) as error:
            check_unsent(before, unsent_digests(model), "step 1")
        says(str(error.value), name, "rollout.sleep_level=1")
        buffer.copy_(buffer.clone().flip(-1))
    check.check(sent, [sent], "step 1")
    model.bias[0] += 1
    with pytest.raises(WeightsMismatch, match=r"\(bias\)"):
        check.check(sent, [model_digests(model, FP32, check.names(sent))], "step 2")
