"""Plan of activations: against the tensors that autograd keeps of real models."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf.config.buffer_sizes import CHUNK_ELEMENTS
from rlhf.models.packing import lay_out, pack
from rlhf.planning.activations import CHUNK_COPIES, PACKED, chunk_bytes, pass_cost
from rlhf.planning.model_shapes import ModelShapes
from rlhf.planning.pass_sizes import PassSize, passes

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
MODELS = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 16},
    "mistral": COMMON,
    "gemma3_text": COMMON | {"head_dim": 16, "sliding_window": 32},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 512, "eos_token_id": 1},
}
TOKENS = 128


def build(name: str, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    config = AutoConfig.for_model(name, **MODELS[name])
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).train()


def kept(model: PreTrainedModel, rows: int = 1) -> int:
    """Return the bytes that autograd keeps of a pass of equal sequences through the layers, without weights."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        ids = torch.arange(TOKENS).view(rows, -1) % 100
        model.base_model(**lay_out(model, ids, torch.full((rows,), TOKENS // rows)).inputs)
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_keeps_what_the_plan_says(name, dtype):
    model = build(name, dtype)
    architecture = ModelShapes({n: tuple(p.shape) for n, p in model.named_parameters()}, model.config.to_dict())
    cost = pass_cost(architecture, dtype.itemsize, "sdpa")
    planned = cost.kept(TOKENS, TOKENS, 3, checkpointing=False) - TOKENS * architecture.hidden * dtype.itemsize
    assert planned == pytest.approx(kept(model), rel=0.05)


@pytest.mark.parametrize(("name", "within"), [("llama", 0.02), ("gemma3_text", 0.08), ("gpt2", 0.02)])
def test_a_packed_pass_keeps_what_the_plan_says(name, within):
    model = build(name, torch.float32)
    architecture = ModelShapes({n: tuple(p.shape) for n, p in model.named_parameters()}, model.config.to_dict())
    pack(model)
    assert model.config._attn_implementation == PACKED
    planned = pass_cost(architecture, 4, PACKED).kept(TOKENS, 32, 3, checkpointing=False) - TOKENS * 64 * 4
    assert planned == pytest.approx(kept(model, rows=4), rel=within)


def test_eager_attention_keeps_an_activation_per_pair_of_tokens():
    fused, eager = (build("llama", torch.float32, name) for name in ("sdpa", "eager"))
    architecture = ModelShapes({n: tuple(p.shape) for n, p in fused.named_parameters()}, fused.config.to_dict())
    planned = [
        pass_cost(architecture, 4, name).kept(TOKENS, TOKENS, 3, checkpointing=False) for name in ("sdpa", "eager")
    ]
    assert planned[1] - planned[0] == pytest.approx(kept(eager) - kept(fused), rel=0.06)


def test_checkpointing_keeps_the_inputs_of_layers():
    model = build("llama", torch.float32)
    architecture = ModelShapes({n: tuple(p.shape) for n, p in model.named_parameters()}, model.config.to_dict())
    cost = pass_cost(architecture, 4, "sdpa")
    whole, again = (cost.kept(TOKENS, TOKENS, 3, checkpointing=checkpointing) for checkpointing in (False, True))
    assert whole - again == TOKENS * 3 * (cost.kept_by_layer - 64 * 4)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    assert kept(model) <= again


def test_a_budget_is_filled_and_a_longer_sample_goes_alone():
    assert passes(64, 10, 4, 100) == PassSize(100, 40, 10, 7)
    assert passes(64, 1000, 400, 100) == PassSize(1000, 400, 1000, 64)
    assert passes(3, 10, 4, 100) == PassSize(30, 12, 10, 1)
    assert passes(0, 10, 4, 100).tokens == 10


def test_chunks_of_logits_are_bounded():
    assert chunk_bytes(3, 100, "cuda") == 4 * CHUNK_COPIES * 300
    assert chunk_bytes(1 << 20, 152_064, "cpu") == 4 * CHUNK_COPIES * CHUNK_ELEMENTS["cpu"]
