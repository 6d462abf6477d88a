"""python -m benchmarks.rollout: compares the rollout engines' tokens per second with transformers' generate.

The embedded engine, vLLM in this process (if installed) and `generate` as TRL calls it sample from the same model with
the same prompts and limits, in rotating order, on a CUDA device if there is one. Figures are medians with minimum and
maximum in brackets; ratios compare runs of one round. With `equal` every sample reaches the limit; with `skewed` many
end-of-sequence tokens end samples, so that a few are much longer than others.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.figures import ratios, rotated, spread
from rlhf.config import RolloutConfig
from rlhf.config.vllm_versions import installation_problem
from rlhf.models.loading import hf_files
from rlhf.models.tiny import FOLDER
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Request, RolloutEngine, SamplingParams
from rlhf.rollout.embedded import build_embedded_engine, eos_token_ids
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.storage.scratch import Scratch

HEAD = 32
"""Head size; vLLM's CPU kernels support few sizes."""
PROMPT_TOKENS = 32


def build(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> PreTrainedModel:
    """Build a random Llama of the given size, because only its speed matters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // HEAD,
        num_key_value_heads=arguments.hidden // HEAD,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, device)
    return model.eval()


def start_vllm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    device: torch.device,
    max_model_len: int,
) -> RolloutEngine:
    """Start vLLM in this process with the weights of `model`."""
    from rlhf.rollout.vllm.engine_start import build_vllm_engine

    files = hf_files(model.config, tokenizer, model.generation_config)
    eos = eos_token_ids(model, tokenizer)
    coordinator = Coordinator(GlooTransport())
    with Scratch() as scratch:
        policy = PolicyFiles(files, scratch.folder / "model", eos, max_model_len)
        engine = build_vllm_engine(config, policy, coordinator, device, seed=0)
    engine.update_weights(model.named_parameters, 0)
    return engine


def run_engine(engine: RolloutEngine, requests: list[Request], repeat: int) -> int:
    """Generate, and return the number of tokens."""
    return sum(map(len, engine.generate(requests, seed=repeat, step=1)))


def run_generate(
    model: PreTrainedModel,
    pad_id: int,
    requests: list[Request],
    eos: list[int] | None,
    repeat: int,
) -> int:
    """Call `generate` with one left-padded batch, as trainers do; return the number of tokens without padding."""
    torch.manual_seed(repeat)
    params = requests[0].params
    prompts = [r.token_ids for r in requests]
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    options = {"eos_token_id": eos, "min_new_tokens": 0 if eos else params.max_tokens}
    with torch.no_grad():
        output = model.generate(  # type: ignore[operator]
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            top_k=0,
            max_new_tokens=params.max_tokens,
            pad_token_id=pad_id,
            **options,
        )
    response = output[:, width:]
    if not eos:
        return response.numel()
    ends = torch.isin(response, torch.tensor(eos, device=response.device))
    return int((ends.cumsum(dim=1) - ends.int() == 0).sum())


def speeds(ways: dict[str, Callable[[int], int]], repeats: int) -> dict[str, list[float]]:
    """Return the tokens per second of each way's runs, interleaved, after one warm-up run of each way."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in rotated(ways.items(), repeat):
            started = time.perf_counter()
            tokens = run(repeat)
            if repeat:
                measured[name].append(tokens / (time.perf_counter() - started))
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--hidden", type=int, default=96, help=f"a multiple of {HEAD}")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    # As in a run, vLLM starts in a process that already has a process group.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = build(arguments, tokenizer, device)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, PROMPT_TOKENS, (arguments.prompts,), generator=generator).tolist()
    prompts = [torch.randint(20, 512, (length,), generator=generator).tolist() for length in lengths]
    missing = installation_problem()
    if missing:
        sys.stdout.write(f"without vLLM: {missing}\n")
    many_eos = list(range(100, 120))
    for shape, limit, eos in (("equal", 16, None), ("equal", 128, None), ("skewed", 256, many_eos)):
        model.generation_config.eos_token_id = eos
        config = RolloutConfig(max_num_seqs=arguments.prompts * arguments.n)
        params = SamplingParams(max_tokens=limit, ignore_eos=eos is None)
        requests = [Request(i, prompt, params, n) for i, prompt in enumerate(prompts) for n in range(arguments.n)]
        embedded = build_embedded_engine(model, tokenizer, config)
        ways: dict[str, Callable[[int], int]] = {"embedded": partial(run_engine, embedded, requests)}
        vllm = None if missing else start_vllm(model, tokenizer, config, device, PROMPT_TOKENS + limit)
        if vllm is not None:
            ways["vLLM"] = partial(run_engine, vllm, requests)
        ways["generate"] = partial(run_generate, model, tokenizer.pad_token_id, requests, eos)
        measured = speeds(ways, arguments.repeats)
        if vllm is not None:
            vllm.close()
        shown = ", ".join(f"{name} {spread(figures, ',.0f')} tokens/s" for name, figures in measured.items())
        pairs = [(name, "generate") for name in measured if name != "generate"]
        pairs += [("vLLM", "embedded")] if vllm is not None else []
        compared = ", ".join(f"{a}/{b} {spread(ratios(measured[a], measured[b]), '.2f')}" for a, b in pairs)
        sys.stdout.write(f"{shape}, limit {limit}: {shown}; {compared}\n")
        sys.stdout.flush()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
