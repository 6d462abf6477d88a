"""vLLM in a rank on a GPU: sleep frees memory, and vLLM generates with the weights of the last weight sync."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.config import RolloutConfig
from rlhf.models.loading import hf_files
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.embedded import eos_token_ids
from rlhf.rollout.policy_files import PolicyFiles
from tests.support.gpus import NEEDS_GPU
from tests.support.numeric_ranks import single_rank
from tests.support.sampled import sampled
from tests.support.tiny_models import tiny_config, tiny_tokenizer

pytestmark = [pytest.mark.vllm, *NEEDS_GPU]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}


def policy(seed: int, device: torch.device) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config("qwen2", **SIZES)).to(device, torch.bfloat16).eval()


@torch.no_grad()
def worst_difference(model: Any, samples: list[Sample], prompts: dict[int, list[int]]) -> float:
    """Return the largest difference between the engine's log-probs and those of `model` for the same tokens."""
    worst = 0.0
    for sample in samples:
        prompt = prompts[sample.uid]
        ids = torch.tensor([prompt + list(sample.token_ids.tolist())], device=model.device)
        every = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        mine = every.gather(1, torch.tensor(sample.token_ids.tolist(), device=model.device)[:, None])[:, 0].cpu()
        worst = max(worst, float((mine - torch.tensor(sample.log_probs)).abs().max()))
    return worst


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_wake_and_reload(level: int, tmp_path: Path) -> None:
    from rlhf.rollout.vllm.engine_start import build_vllm_engine

    device = torch.device("cuda", 0)
    prompts = {uid: list(range(10 + uid, 22 + 2 * uid)) for uid in range(6)}
    requests = [Request(uid, ids) for uid, ids in prompts.items()]
    with single_rank("cpu:gloo,cuda:nccl"):
        models = [policy(seed, device) for seed in (1, 2)]
        tokenizer = tiny_tokenizer()
        config = RolloutConfig(
            name="vllm", dtype="bfloat16", max_num_seqs=8, sleep_level=level, gpu_memory_utilization=0.3
        )
        files = hf_files(models[0].config, tokenizer, models[0].generation_config)
        files_of_policy = PolicyFiles(files, tmp_path / "model", eos_token_ids(models[0], tokenizer), 128)
        engine = build_vllm_engine(config, files_of_policy, Coordinator(GlooTransport()), device, seed=1)
        try:
            generated = []
            for version, model in enumerate([*models, models[0]]):
                engine.update_weights(model.named_parameters, version)
                samples = sampled(engine, requests, GREEDY, seed=1, step=1)
                assert {sample.version for sample in samples} == {version}
                assert worst_difference(model, samples, prompts) < 0.1
                assert worst_difference(models[1 - version % 2], samples, prompts) > 0.1
                generated.append([sample.token_ids.tolist() for sample in samples])
                awake = torch.cuda.mem_get_info(device)[0]
                engine.sleep()
                freed = torch.cuda.mem_get_info(device)[0] - awake
                assert freed > 0.2 * torch.cuda.mem_get_info(device)[1]
            assert generated[0] == generated[2] != generated[1]
            if level == 1:  # level 1 keeps the weights, so no weight sync is needed
                woken = sampled(engine, requests, GREEDY, seed=1, step=1)
                assert [sample.token_ids.tolist() for sample in woken] == generated[2]
        finally:
            engine.close()
