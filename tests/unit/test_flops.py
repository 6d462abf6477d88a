"""FLOPs of an update, compared with torch's own count, and the devices whose peak is known."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from rlhf.batch import Batch, TokenCounts
from rlhf.config import LoraConfig
from rlhf.learning.critic import response_values
from rlhf.learning.policy import response_log_probs
from rlhf.learning.utilization import Utilization
from rlhf.models.adapter_layers import add_adapters
from rlhf.models.flops import PEAKS, UpdateFlops, peak_flops
from rlhf.models.log_prob_head import with_log_probs
from rlhf.models.skeleton import materialise
from tests.support.tiny_updates import random_batch, tiny_qwen2, tiny_value_model


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=64, n_embd=16, n_layer=2, n_head=2))


def log_probs(model: PreTrainedModel, batch: Batch) -> Tensor:
    return response_log_probs(with_log_probs(model), batch, 1.0, with_entropy=True)[0]


def counted(model: PreTrainedModel, outputs: Callable[[PreTrainedModel, Batch], Tensor], batch: Batch) -> int:
    with FlopCounterMode(display=False) as counter:
        outputs(model, batch).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("model", "outputs"), [(tiny_qwen2, log_probs), (gpt2, log_probs), (tiny_value_model, response_values)]
)
def test_flops_equal_the_count_of_torch(model, outputs):
    """Compare with torch's count, except for the half of attention that a causal mask leaves out.

    Torch counts the head's logits twice, because they are recomputed, and misses the head's gradient, which is added in
    place. The two differences cancel.
    """
    policy = model()
    policy.set_attn_implementation("eager")  # torch does not count the CPU's kernel of attention
    batch = random_batch(seed=1, samples=3, prompt=(5, 5), response=(20, 20))  # nothing is padding
    flops, samples, length = UpdateFlops.of(policy), 3, 25
    assert flops is not None
    tokens = TokenCounts(samples * length, samples * 20, samples * length**2)
    not_needed = 6 * flops.attention * tokens.squares
    assert flops.of_tokens(tokens) == counted(policy, outputs, batch) - not_needed


def test_frozen_weights_add_no_flops_for_weight_gradients():
    policy = tiny_qwen2()
    add_adapters(policy, LoraConfig(rank=4), torch.float32)
    materialise(policy, torch.device("cpu"))
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    policy.set_attn_implementation("eager")
    batch = random_batch(seed=1, samples=3, prompt=(5, 5), response=(20, 20))
    flops, samples, length = UpdateFlops.of(policy), 3, 25
    assert flops is not None
    tokens = TokenCounts(samples * length, samples * 20, samples * length**2)
    # Torch skips the gradient of the first layer's input through q, k and v and through their A: nothing needs it. It
    # counts the head's logits twice, because they are recomputed.
    first = policy.model.layers[0].self_attn
    projections = [getattr(first, f"{name}_proj") for name in "qkv"]
    inputs = sum(p.base_layer.weight.numel() + p.lora_A["default"].weight.numel() for p in projections)
    others = 2 * inputs * tokens.total - 2 * flops.head * tokens.responses - 6 * flops.attention * tokens.squares
    assert flops.of_tokens(tokens) == counted(policy, log_probs, batch) + others


def test_a_layer_with_a_sliding_window_counts_the_window():
    policy, window, lengths = tiny_qwen2(), 7, (5, 7, 20)
    full = UpdateFlops.of(policy)
    policy.config.sliding_window = window
    policy.config.layer_types = ["sliding_attention", *["full_attention"] * (policy.config.num_hidden_layers - 1)]
    flops = UpdateFlops.of(policy)
    assert full is not None
    assert flops is not None
    per_layer = full.attention // policy.config.num_hidden_layers
    beyond = {window: sum(max(0, length - window) ** 2 for length in lengths)}
    tokens = TokenCounts(sum(lengths), 10, sum(length**2 for length in lengths), beyond)
    # By brute force: each token sees itself and up to window - 1 tokens before it. A pair counts as 2, so that the sum
    # without a window is length * (length + 1); the estimate leaves out the diagonal's half.
    seen = sum(2 * min(token + 1, window) for length in lengths for token in range(length))
    everything = sum(length * (length + 1) for length in lengths)
    diagonal = sum(max(0, length - window) for length in lengths)
    left_out = full.of_tokens(tokens) - flops.of_tokens(tokens)
    assert left_out == 6 * per_layer * (everything - seen - diagonal)


def test_flops_of_moe_and_hybrid_models_are_none():
    config = Qwen2MoeConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_experts=4)
    with torch.device("meta"):
        assert UpdateFlops.of(Qwen2MoeForCausalLM(config)) is None
    hybrid = tiny_qwen2()
    hybrid.config.layer_types = ["linear_attention", "full_attention"]
    assert UpdateFlops.of(hybrid) is None


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_flops_are_found_by_words_of_the_device_name(name, known):
    expected = PEAKS[known] if known else (None, None)
    assert (peak_flops(name, torch.bfloat16), peak_flops(name, torch.float32)) == expected
    assert peak_flops(name, torch.float16) is None


def test_utilization_is_of_the_update_s_own_seconds():
    utilization = Utilization(peak=1000.0)
    utilization.add("actor", UpdateFlops(body=10, head=5, attention=2), epochs=2)
    utilization.add("critic", None, epochs=1)
    tokens = TokenCounts(total=30, responses=20, squares=500)
    found = utilization.metrics(tokens, {"timing_s/update_actor": 12.0, "timing_s/update_critic": 1.0})
    assert found == {"perf/mfu/actor": 2 * 6 * (300 + 100 + 1000) / 12000}
    assert utilization.metrics(tokens, {}) == {}, "a warm-up of the critic trains no actor"
    assert Utilization(None).metrics(tokens, {"timing_s/update_actor": 1.0}) == {}
