"""Adapters that vLLM serves beside a base it keeps, against the merged model in the embedded engine."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.config import LoraConfig, RolloutConfig
from rlhf.errors import UserError
from rlhf.models.adapter_config import PREFIX
from rlhf.models.loading import hf_files
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.embedded import build_embedded_engine, eos_token_ids
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.weight_digest import WeightsMismatch
from rlhf.storage.scratch import Scratch
from tests.support.launching import TINY_POLICY
from tests.support.numeric_ranks import single_rank
from tests.support.sampled import sampled
from tests.support.tiny_models import tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
LORA = LoraConfig(enabled=True, rank=4, alpha=12.0, use_rslora=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


class Served:
    """The bundled policy with random adapters, and an engine that serves the adapters."""

    def __init__(self) -> None:
        from rlhf.rollout.vllm.native_adapters import build_adapter_engine

        torch.manual_seed(0)
        self.base = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32).eval()
        settings = PeftConfig(r=4, lora_alpha=12, use_rslora=True, target_modules="all-linear", init_lora_weights=False)
        self.model: Any = get_peft_model(copy.deepcopy(self.base), settings)
        self.tokenizer, self.bases = tiny_tokenizer(), 0
        files = hf_files(self.base.config, self.tokenizer, self.base.generation_config)
        eos = eos_token_ids(self.base, self.tokenizer)
        with Scratch() as scratch:
            self.engine = build_adapter_engine(
                LORA,
                RolloutConfig(name="vllm", max_num_seqs=32),
                PolicyFiles(files, scratch.folder / "model", eos, 112),
                Coordinator(GlooTransport()),
                torch.device("cpu"),
                seed=1,
            )
        self.move(5.0)

    def sent_base(self) -> Iterator[tuple[str, Tensor]]:
        self.bases += 1
        return self.base.named_parameters()

    def factors(self) -> dict[str, Tensor]:
        return {
            name.removeprefix(PREFIX).replace(".default", ""): parameter.data
            for name, parameter in self.model.named_parameters()
            if "lora_" in name
        }

    def move(self, scale: float) -> None:
        for tensor in self.factors().values():
            tensor.mul_(scale).add_(0.02 * torch.randn_like(tensor))

    def hand_over(self, step: int) -> None:
        self.engine.update_adapters(self.sent_base, lambda: self.factors().items(), step)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with single_rank():
        made = Served()
        yield made
        made.engine.close()


def test_samples_are_those_of_the_merged_model_and_the_base_comes_once(served):
    prompts = [Request(uid, [5 + uid, 7, 9, 11 + uid]) for uid in range(4)]
    seen = []
    for step in (1, 2):
        before = {name: tensor.clone() for name, tensor in served.factors().items()}
        served.hand_over(step)
        # vLLM multiplies by the scale in place. This must not change the trainer's own tensors.
        assert all(torch.equal(tensor, before[name]) for name, tensor in served.factors().items())
        merged = copy.deepcopy(served.model).merge_and_unload()
        embedded = build_embedded_engine(merged, served.tokenizer, RolloutConfig())
        found = sampled(served.engine, prompts, GREEDY, seed=1, step=2)
        expected = sampled(embedded, prompts, GREEDY, seed=1, step=2)
        assert [sample.token_ids.tolist() for sample in found] == [sample.token_ids.tolist() for sample in expected]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-3)
        seen.append([sample.log_probs.tolist() for sample in found])
        served.move(1.0)
    assert seen[0] != seen[1]
    assert served.bases == 1


def test_an_engine_that_keeps_old_adapters_is_found(served, monkeypatch):
    served.hand_over(3)
    served.move(1.0)
    with monkeypatch.context() as patched:
        patched.setattr(served.engine, "_replace_adapters", lambda *_: None)
        with pytest.raises(WeightsMismatch, match=r"the engine still has the old values: .*qkv_proj\.lora_a"):
            served.hand_over(4)
    served.hand_over(5)


def test_a_base_that_has_changed_is_found(served):
    served.hand_over(6)
    weight = next(p for name, p in served.engine._model().named_parameters() if name.endswith("input_layernorm.weight"))
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0] += 1
        with pytest.raises(WeightsMismatch, match="input_layernorm"):
            served.hand_over(7)
        weight.copy_(kept)
    served.hand_over(8)


def test_layers_that_vllm_does_not_serve_are_told(served):
    odd = {"model.layers.0.self_attn.odd.lora_A.weight": torch.ones(4, 8)}
    odd["model.layers.0.self_attn.odd.lora_B.weight"] = torch.ones(8, 4)
    with pytest.raises(UserError, match=r"serves no adapters for .*odd of this model .* Set rollout\.lora=merged"):
        served.engine.update_adapters(served.sent_base, odd.items, 9)
    served.hand_over(10)
