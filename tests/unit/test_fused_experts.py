"""Fused experts: each rank reads only its part from files with one tensor per expert.

Files that are written under the model's names can be opened again.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3MoeConfig

from rlhf.models.fused_experts import fuse_experts
from rlhf.models.loading import ModelSource
from rlhf.models.model_files import ModelFiles, read_headers
from rlhf.models.weights import ModelReader, PendingModel
from rlhf.storage.boxes import Box
from rlhf.storage.shards import Shard
from tests.support.checkpoints import equal_bits
from tests.support.thread_ranks import make_coordinator

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 20}
KINDS = {
    "mixtral": MixtralConfig(**SIZES, intermediate_size=6, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=4, moe_intermediate_size=6, num_experts=12, num_experts_per_tok=2),
}
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(params=KINDS)
def model(request, tmp_path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(KINDS[request.param])
    model.save_pretrained(tmp_path)
    return model


def test_a_rank_reads_the_experts_that_it_owns(model, tmp_path, monkeypatch):
    headers = read_headers(tmp_path)
    assert headers is not None
    assert sum(".experts." in name for name in headers) > 10
    fused, parts = fuse_experts(headers, model.config)
    assert {name: tensor.shape for name, tensor in fused.items() if name in parts} == {
        name: tuple(p.shape) for name, p in model.named_parameters() if "experts" in name
    }
    read: list[int] = []
    original = ModelReader.read

    def counting(self: ModelReader, name: str, low: int, high: int) -> torch.Tensor:
        rows = original(self, name, low, high)
        read.append(rows.numel())
        return rows

    monkeypatch.setattr(ModelReader, "read", counting)
    coordinator, cpu = make_coordinator(), torch.device("cpu")
    files = ModelFiles(ModelSource("model.path", str(tmp_path)), tmp_path, None, headers, "")
    expected = model.get_parameter(GATE_UP).detach()
    size = expected.numel()
    # The fourth range goes from inside the up part of one expert to inside the gate part of another.
    for start, stop in ((0, size), (0, size // 2), (size // 2, size), (80, size - 90), (size, size)):
        read.clear()
        local = torch.full((stop - start,), torch.nan)
        shard = Shard(tuple(expected.shape), (start,), local)
        PendingModel(model, parts, ModelReader(files, coordinator, cpu)).fill({GATE_UP: shard})
        assert torch.equal(local, expected.flatten()[start:stop])
        assert sum(read) <= stop - start + 2 * 8  # a row at either end
    experts, rows, columns = expected.shape
    for box in (Box((0, 0, 3), (experts, rows, columns - 3)), Box((1, rows // 4, 2), (2, rows // 2, 4))):
        shard = Shard(tuple(expected.shape), box.offsets, torch.full(box.sizes, torch.nan))
        PendingModel(model, parts, ModelReader(files, coordinator, cpu)).fill({GATE_UP: shard})
        assert torch.equal(shard.local, shard.cut(expected))


def test_files_with_fused_expert_tensors_are_read_unchanged(model, tmp_path):
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert GATE_UP in tensors
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert equal_bits(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), tensors)
    headers = read_headers(tmp_path)
    assert headers is not None
    assert fuse_experts(headers, model.config) == (headers, {})


def test_experts_of_several_kinds_are_not_fused(model, tmp_path):
    headers = read_headers(tmp_path)
    assert headers is not None
    whole = fuse_experts(headers, model.config)[1]
    odd = min(name for name in headers if ".experts.3." in name)
    rows, columns = headers[odd].shape
    for other in (
        {"dtype": "BF16"},
        {"shape": (rows, columns + 1)},
        {"shape": (rows + 1, columns)},
        {"shape": (rows,)},
    ):
        kept, parts = fuse_experts(headers | {odd: replace(headers[odd], **other)}, model.config)
        (left,) = whole.keys() - parts.keys()
        assert odd in {part.name for part in whole[left]} <= kept.keys()
