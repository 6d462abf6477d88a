"""Tests that tensors outside parameters and buffers are saved before an engine's sleep, and restored in place."""

from types import SimpleNamespace

import torch
from torch import nn

from rlhf.rollout.vllm.hidden_tensors import HiddenTensors, hidden_tensors


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("rotary", torch.ones(2), persistent=False)
        self.table = torch.arange(4.0)
        self.tables = [torch.full((2,), 5.0), {"cos": (torch.full((2,), 6.0),)}]
        self.impl = SimpleNamespace(slopes=torch.full((3,), 7.0), layer=self)
        self.shared = self.impl.slopes
        self.first_row = self.proj.weight[0]
        self.kv_cache = [torch.zeros(8)]


def values(model: nn.Module) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in hidden_tensors(model)]


def test_tensors_outside_parameters_buffers_and_caches():
    model = nn.Sequential(Layer(), nn.ReLU())
    assert sorted(values(model)) == [[0, 1, 2, 3], [5, 5], [6, 6], [7, 7, 7]]


def test_an_object_shared_by_two_modules_at_different_depths_is_found():
    first, second = nn.ReLU(), nn.ReLU()
    shared = SimpleNamespace(tables=[torch.ones(2)])
    first.far = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(shared=shared)))
    second.near = shared
    assert values(nn.Sequential(first, second)) == [[1, 1]]


def test_hidden_tensors_are_restored_in_place_after_a_sleep():
    model = nn.Sequential(Layer(), Layer())
    before = values(model)
    assert len(before) == 8
    saved = HiddenTensors(model)
    addresses = [tensor.data_ptr() for tensor in hidden_tensors(model)]
    for tensor in hidden_tensors(model):
        tensor.fill_(-1)
    saved.restore()
    assert values(model) == before
    assert [tensor.data_ptr() for tensor in hidden_tensors(model)] == addresses


def test_a_plain_torch_layer_has_no_hidden_tensors():
    assert hidden_tensors(nn.TransformerEncoderLayer(8, 2, batch_first=True)) == []
