"""vLLM in the rank's own process beside the embedded engine and transformers, on the same weights."""

import copy
import logging
import os
import random
import signal
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from rlhf import events
from rlhf.backends import build_backend
from rlhf.backends.training import Training
from rlhf.config import BackendConfig, OptimConfig
from rlhf.config.schema.rollout import EngineKwargsConfig, RolloutConfig
from rlhf.errors import UserError
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.models.loading import hf_files
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.embedded import build_embedded_engine, eos_token_ids
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.vllm.hidden_tensors import HiddenTensors, hidden_tensors
from rlhf.rollout.weight_digest import WeightsMismatch
from rlhf.storage.scratch import SHARED_MEMORY, Scratch
from tests.support.launching import TINY_POLICY, question
from tests.support.numeric_ranks import run_ranks, single_rank
from tests.support.sampled import sampled
from tests.support.tiny_models import save, tiny_config, tiny_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
]
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
RANDOM = SamplingParams(temperature=1.5, max_tokens=24)


def policy(name: str) -> Any:
    """Return the bundled policy with noise and a tied head, or a random Qwen2 with an untied head."""
    if name == "bundled":
        return shaken(AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32).eval(), 0.4)
    torch.manual_seed(5)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "max_position_embeddings": 256}
    return AutoModelForCausalLM.from_config(tiny_config("qwen2", tie_word_embeddings=False, **sizes)).float().eval()


def shaken(model: Any, share: float) -> Any:
    """Add noise to all weights. `share` times a tensor's standard deviation is the standard deviation of its noise."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += share * parameter.detach().std() * noise
    return model


def requests(tokenizer: Any, count: int = 12) -> list[Request]:
    prompts = [[{"role": "user", "content": question(11 + 5 * i, 90 - 7 * i)}] for i in range(count)]
    ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
    return [Request(100 + i, tokens) for i, tokens in enumerate(ids)]


def build(model: Any, tokenizer: Any, folder: Path | None = None, **rollout: Any) -> Any:
    """Return a vLLM engine. Several ranks need the same `folder`."""
    from rlhf.rollout.vllm.engine_start import build_vllm_engine

    config = RolloutConfig(name="vllm", max_num_seqs=32, **rollout)
    files = hf_files(model.config, tokenizer, model.generation_config)
    eos = eos_token_ids(model, tokenizer)
    coordinator = Coordinator(GlooTransport())
    with Scratch() as scratch:
        policy = PolicyFiles(files, folder or scratch.folder / "model", eos, max_model_len=64 + 48)
        return build_vllm_engine(config, policy, coordinator, CPU, seed=1)


def process() -> dict[str, Any]:
    """Return the state of this process that a library may change unnoticed."""
    root = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": (torch.get_num_threads(), torch.set_num_threads, os.sched_getaffinity(0)),
        "accelerator": (torch.accelerator.synchronize, torch.accelerator.empty_cache),
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "precision": (torch.get_float32_matmul_precision(), torch.is_grad_enabled()),
        "logging": (root.level, list(root.handlers)),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "compiles": torch._dynamo.config.disable,
    }


class Pair:
    """A model in vLLM and in the embedded engine. `changed` names the process state that vLLM changed."""

    def __init__(self, name: str) -> None:
        self.model, self.tokenizer = policy(name), tiny_tokenizer()
        self.requests = requests(self.tokenizer)
        torch.use_deterministic_algorithms(True)
        try:
            before = process()
            # Blocks are so small that prompts of a test fill them.
            self.vllm = build(self.model, self.tokenizer, engine_kwargs=EngineKwargsConfig({"block_size": 32}))
            self.vllm.update_weights(self.model.named_parameters, 3)
            sampled(self.vllm, self.requests, RANDOM, 3, seed=9, step=9)
            self.changed = {name for name, value in process().items() if value != before[name]}
        finally:
            torch.use_deterministic_algorithms(False)
        self.embedded = build_embedded_engine(self.model, self.tokenizer, RolloutConfig())

    def sampled(self, params: SamplingParams, seed: int = 1, step: int = 2) -> list[Sample]:
        return sampled(self.vllm, self.requests, params, 3 if params.temperature else 2, seed=seed, step=step)


@pytest.fixture(scope="module")
def rank() -> Iterator[None]:
    with single_rank():
        yield


@pytest.fixture(scope="module", params=["bundled", "own head"])
def pair(request: pytest.FixtureRequest, rank: None) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.vllm.close()


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], response: list[int], params: SamplingParams) -> torch.Tensor:
    """Return transformers' log-prob of each token of `response` under `params` (without top_p)."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    for position, row in enumerate(logits):
        history = torch.tensor([prompt + response[:position]])
        logits[position] = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, row[None])[0]
    logits = logits / (params.temperature or 1.0)
    if params.min_p > 0:
        logits = MinPLogitsWarper(params.min_p)(None, logits)
    if params.top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_vllm_restores_the_process_state(pair: Pair):
    assert pair.changed == set()


def test_greedy_is_what_the_embedded_engine_says(pair: Pair):
    expected = sampled(pair.embedded, pair.requests, GREEDY, 2, seed=1, step=2)
    got = pair.sampled(GREEDY)
    assert [(s.uid, s.sample, s.token_ids.tolist(), s.finish_reason) for s in got] == [
        (s.uid, s.sample, s.token_ids.tolist(), s.finish_reason) for s in expected
    ]
    assert {s.version for s in got} == {3}
    assert len({tuple(s.token_ids.tolist()) for s in got}) > 4
    for ours, theirs in zip(expected, got, strict=True):
        np.testing.assert_allclose(theirs.log_probs, ours.log_probs, atol=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        RANDOM,
        replace(RANDOM, temperature=0.7, top_k=5),
        replace(RANDOM, min_p=0.1, repetition_penalty=1.4),
        replace(GREEDY, repetition_penalty=1.4),
    ],
    ids=["plain", "top-k", "min-p and penalty", "greedy with penalty"],
)
def test_log_probs_are_those_of_what_was_sampled_from(pair: Pair, params: SamplingParams):
    prompts = {r.uid: r.token_ids for r in pair.requests}
    worst = 0.0
    for sample in pair.sampled(params):
        expected = log_probs(pair.model, prompts[sample.uid], sample.token_ids.tolist(), params)
        worst = max(worst, (expected - torch.tensor(sample.log_probs)).abs().max().item())
    logging.getLogger(__name__).info("the largest difference of a log-prob from transformers' is %.2g", worst)
    assert worst < 1e-4


def test_samples_are_a_function_of_their_coordinates(pair: Pair):
    first = pair.sampled(RANDOM)
    assert [(s.uid, s.sample) for s in first] == [(r.uid, i) for r in pair.requests for i in range(3)]
    tokens = {(s.uid, s.sample): s.token_ids.tolist() for s in first}
    assert len({tuple(ids) for ids in tokens.values()}) > len(pair.requests)
    single = [s for r in reversed(pair.requests) for s in sampled(pair.vllm, [r], RANDOM, 2, seed=1, step=2)]
    assert {(s.uid, s.sample): s.token_ids.tolist() for s in single} == {
        key: ids for key, ids in tokens.items() if key[1] < 2
    }
    for changed in ({"seed": 2}, {"step": 3}):
        assert [s.token_ids.tolist() for s in pair.sampled(RANDOM, **changed)] != [s.token_ids.tolist() for s in first]
    renamed = [replace(r, uid=r.uid + 50) for r in pair.requests]
    assert [s.token_ids.tolist() for s in sampled(pair.vllm, renamed, RANDOM, 3, seed=1, step=2)] != list(
        tokens.values()
    )


def test_finished_samples_are_counted(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    reports: list[tuple[str, int, int]] = []
    monkeypatch.setattr(events, "_followers", [lambda *report: reports.append(report)])
    sampled(pair.vllm, pair.requests, RANDOM, 3, seed=1, step=2)
    total = 3 * len(pair.requests)
    assert reports[-1] == (events.GENERATING, total, total)
    assert [done for _, done, _ in reports] == sorted({done for _, done, _ in reports})


def test_nothing_of_earlier_calls_matters_to_the_bit(pair: Pair):
    def again() -> list[Sample]:
        return sampled(pair.vllm, prompts, replace(RANDOM, max_tokens=12), seed=1, step=2)

    prompts = [replace(r, token_ids=r.token_ids * 2) for r in pair.requests]
    first = again()
    # Longer prompts with the same beginnings, so that the cache has blocks of these beginnings.
    longer = [replace(r, token_ids=r.token_ids + r.token_ids[:9]) for r in prompts[::2]]
    sampled(pair.vllm, longer, replace(RANDOM, max_tokens=20), seed=4, step=1)
    assert again() == first
    pair.vllm.update_weights(pair.model.named_parameters, 3)
    assert again() == first


def test_samples_end_at_stop_strings_eos_or_max_tokens(pair: Pair):
    forever = pair.sampled(replace(RANDOM, ignore_eos=True))
    assert {(len(s), s.finish_reason) for s in forever} == {(24, "length")}
    short = pair.sampled(replace(RANDOM, ignore_eos=True, stop=("5", "e")))
    stopped = [s for s in short if s.finish_reason == "stop"]
    assert stopped
    for sample in short:
        text = pair.tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=False)
        at_the_end = any(ending in pair.tokenizer.decode(sample.token_ids.tolist()[-1:]) for ending in "5e")
        assert at_the_end == (sample.finish_reason == "stop"), text


def test_empty_and_too_long_prompts_are_errors(pair: Pair):
    with pytest.raises(UserError, match=r"data\.max_prompt_length"):
        sampled(pair.vllm, [Request(1, [7] * 100)], RANDOM, 3, seed=1, step=1)
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        sampled(pair.vllm, [Request(1, [])], RANDOM, 3, seed=1, step=1)
    assert sampled(pair.vllm, [], RANDOM, 3, seed=1, step=1) == []


def test_an_updated_engine_equals_a_new_engine_with_the_same_weights(pair: Pair, tmp_path: Path):
    from rlhf.rollout.vllm.engine_start import ENVIRONMENT
    from rlhf.rollout.vllm.process_state import ProcessState

    before = pair.sampled(GREEDY)
    trained = shaken(copy.deepcopy(pair.model), 0.4)
    save(trained, tmp_path)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in trained.named_parameters():
            tensor = parameter.detach().clone()
            alive.add(tensor)
            most.append(len(alive))
            yield name, tensor

    pair.vllm.update_weights(gathered, 4)
    # At any time, the only gathered tensors alive are those of one layer that vLLM fuses.
    assert max(most) <= 8 < len(most)
    after = pair.sampled(GREEDY)
    pair.vllm.update_weights(pair.model.named_parameters, 3)
    assert {s.version for s in after} == {4}
    assert [s.token_ids.tolist() for s in after] != [s.token_ids.tolist() for s in before]

    with ProcessState(ENVIRONMENT, compiles=False).entered():
        from vllm import LLM
        from vllm import SamplingParams as VllmSamplingParams

        fresh = LLM(
            str(tmp_path),
            dtype="float32",
            enforce_eager=True,
            enable_chunked_prefill=False,
            max_model_len=112,
            kv_cache_memory_bytes=64 << 20,
            distributed_executor_backend="uni",
            max_num_seqs=32,
        )
        fresh.llm_engine.engine_core._finalizer.detach()
        wanted = VllmSamplingParams(temperature=0.0, max_tokens=24, detokenize=False)
        prompts = [{"prompt_token_ids": r.token_ids} for r in pair.requests]
        outputs = fresh.generate(prompts, wanted, use_tqdm=False)
    assert [s.token_ids.tolist() for s in after[::2]] == [list(o.outputs[0].token_ids) for o in outputs]
    embedded = build_embedded_engine(trained, pair.tokenizer, RolloutConfig())
    expected = sampled(embedded, pair.requests, GREEDY, 2, seed=1, step=2)
    assert [s.token_ids.tolist() for s in after] == [s.token_ids.tolist() for s in expected]


KEPT = "the engine still has the old values: "
OTHER = "Neither the old values nor the values sent: "
DOWN = "model.layers.0.mlp.down_proj.weight"
QUERY, QKV = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"


def flipped(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.detach().clone()
    changed.view(torch.int32).view(-1)[7] ^= 1
    return changed


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (lambda old, name, weight: None, KEPT + "[0-9]{2} "),
        (lambda old, name, weight: None if name == DOWN else weight, rf"{KEPT}1 \({DOWN}\)\.$"),
        (lambda old, name, weight: old[name] if name == QUERY else weight, rf"{OTHER}1 \({QKV}\)\.$"),
        (lambda old, name, weight: flipped(weight) if name == QUERY else weight, rf"{OTHER}1 \({QKV}\)\.$"),
        (lambda old, name, weight: weight.flip(0) if name == QUERY else weight, rf"{OTHER}1 \({QKV}\)\.$"),
        (lambda old, name, weight: weight.flip(1) if name == DOWN else weight, rf"{OTHER}1 \({DOWN}\)\.$"),
    ],
    ids=["nothing", "one not", "part of a fused one not", "a bit", "places in a fused one", "places"],
)
def test_weights_that_vllm_does_not_hold_after_a_hand_over_are_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, loaded: Any, message: str
):
    old, trained = dict(pair.model.named_parameters()), shaken(copy.deepcopy(pair.model), 0.4)
    model = pair.vllm._model()
    every, load = {name for name, _ in model.named_parameters()}, type(model).load_weights

    def lies(model: Any, weights: Any) -> set[str]:
        loaded_weights = ((name, loaded(old, name, weight)) for name, weight in weights)
        load(model, ((name, weight) for name, weight in loaded_weights if weight is not None))
        return every

    pair.vllm.update_weights(pair.model.named_parameters, 3)
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "load_weights", lies)
        with pytest.raises(WeightsMismatch, match=message):
            pair.vllm.update_weights(trained.named_parameters, 4)
    pair.vllm.update_weights(trained.named_parameters, 4)
    pair.vllm.update_weights(pair.model.named_parameters, 3)


def test_the_places_of_all_elements_are_checked(pair: Pair):
    assert pair.vllm._check_weights._rearranged == set()


def test_a_head_that_computes_with_old_weights_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    from rlhf.rollout.vllm import colocated

    if not pair.model.config.tie_word_embeddings:
        pytest.skip("vLLM itself updates an untied head")
    pair.vllm.update_weights(pair.model.named_parameters, 3)
    trained = shaken(copy.deepcopy(pair.model), 0.4)
    with monkeypatch.context() as patched:
        patched.setattr(colocated, "repack", lambda model: None)
        with pytest.raises(WeightsMismatch, match=r"1 \(model\.embed_tokens\.weight\)"):
            pair.vllm.update_weights(trained.named_parameters, 4)
    pair.vllm.update_weights(pair.model.named_parameters, 3)


def test_weights_that_changed_in_a_sleep_are_found_before_generation(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """The test imitates sleep level 1, which a CPU does not have."""
    norm = pair.vllm._model().model.norm.weight
    pair.vllm.update_weights(pair.model.named_parameters, 3)
    before = pair.sampled(GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(pair.vllm, "_wake", lambda *parts: pair.vllm._asleep.clear())
        pair.vllm._asleep = {"weights", "kv_cache"}
        assert pair.sampled(GREEDY) == before
        pair.vllm._asleep = {"weights", "kv_cache"}
        norm.data.view(torch.int32)[0] ^= 1
        with pytest.raises(WeightsMismatch, match=r"\(step 3\).*1 \(model\.norm\.weight\)"):
            pair.sampled(GREEDY)
    pair.vllm.update_weights(pair.model.named_parameters, 3)


def test_ranks_with_gpus_make_vllms_groups_in_one_split_each(monkeypatch: pytest.MonkeyPatch):
    from vllm import envs

    from rlhf.rollout.vllm.engine_start import SPLITS_GROUPS, _environment

    monkeypatch.delenv(SPLITS_GROUPS, raising=False)
    assert SPLITS_GROUPS in envs.environment_variables
    gpu = torch.device("cuda", 1)
    assert [SPLITS_GROUPS in _environment(*where) for where in ((CPU, 2), (gpu, 1))] == [False, False]
    assert _environment(gpu, 2)[SPLITS_GROUPS] == "1"
    monkeypatch.setenv(SPLITS_GROUPS, "0")
    assert _environment(gpu, 2)[SPLITS_GROUPS] == "0"


def test_the_probe_after_a_sleep_finds_lost_tensors(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """The test imitates sleep level 2, which a CPU does not have."""
    training = Training(OptimConfig(), grad_clip=1.0, total_optimizer_steps=1)
    actor = build_backend(copy.deepcopy(pair.model), BackendConfig(), CPU, training)
    monkeypatch.setattr(pair.vllm, "sleep", lambda: True)
    wanted = [replace(request, params=RANDOM) for request in pair.requests[:2]]
    first = PolicySampler(pair.vllm, actor, seed=1).generate(wanted, version=3, step=1)
    assert [len(sample.token_ids) > 0 for sample in first] == [True, True]
    tables = {id(t): t for name, t in pair.vllm._model().named_buffers() if name.endswith("cos_sin_cache")}
    saved = [(table, table.clone()) for table in tables.values()]
    assert saved
    try:
        for table, _ in saved:
            table.zero_()
        with pytest.raises(UserError, match=r"rollout\.sleep_level=1"):
            PolicySampler(pair.vllm, actor, seed=1).generate(wanted, version=3, step=1)
    finally:
        for table, values in saved:
            table.copy_(values)


def test_structure_arguments_of_vllm_and_weights_that_do_not_fit(rank: None):
    model, tokenizer = policy("own head"), tiny_tokenizer()
    settings = EngineKwargsConfig({"max_num_batched_tokens": 333})
    with pytest.raises(UserError, match=r"rollout\.engine_kwargs\.vllm"):
        build(model, tokenizer, engine_kwargs=EngineKwargsConfig({"quantization": "none such"}))
    engine = build(model, tokenizer, structured_outputs={"choice": ["12", "345"]}, engine_kwargs=settings)
    engine.update_weights(model.named_parameters, 2)
    samples = sampled(engine, requests(tokenizer, 6), RANDOM, 3, seed=1, step=1)
    texts = {tokenizer.decode(s.token_ids.tolist(), skip_special_tokens=True) for s in samples}
    assert texts == {"12", "345"}
    assert engine._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens == 333

    weights = dict(model.named_parameters())
    norm = weights["model.norm.weight"]

    def check_rejected(changed: dict[str, Any], message: str) -> None:
        walked = []

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in changed.items():
                walked.append(name)
                yield name, tensor

        with pytest.raises(ValueError, match=message):
            engine.update_weights(stream, 1)
        assert walked == list(changed)

    check_rejected({"model.other.weight": norm} | weights, "has no weight named 'model.other.weight'")
    check_rejected(weights | {"model.embed_tokens.weight": torch.zeros(600, 128)}, r"has shape \[600, 128\]")
    lacking = {name: tensor for name, tensor in weights.items() if "k_proj" not in name}
    check_rejected(lacking, r"4 weights .* were not updated: model.layers.0.self_attn.k_proj.bias")

    engine.close()


def experts_beside_the_embedded_engine() -> list[tuple[Any, Any, float]]:
    """Return after each of two updates the tokens of vLLM and the embedded engine, and how far log-probs differ."""
    torch.manual_seed(5)
    tokenizer, sizes = tiny_tokenizer(), {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    config = tiny_config("mixtral", num_attention_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.config.architectures = [type(model).__name__]
    engine, found = build(model, tokenizer), []
    for version in (1, 2):
        engine.update_weights(model.named_parameters, version)
        assert engine._check_weights._computed == set()
        plain = build_embedded_engine(model, tokenizer, RolloutConfig())
        sampled_tokens, expected = (sampled(e, requests(tokenizer), GREEDY, 2, seed=1, step=1) for e in (engine, plain))
        pairs = zip(sampled_tokens, expected, strict=True)
        apart = max(float((torch.tensor(a.log_probs) - torch.tensor(b.log_probs)).abs().max()) for a, b in pairs)
        found.append(([s.token_ids.tolist() for s in sampled_tokens], [s.token_ids.tolist() for s in expected], apart))
        shaken(model, 0.4)
    engine.close()
    return found


def test_experts_are_synced_one_by_one():
    """vLLM expects the tensor names of the files. It packs experts only at the first load, so we pack reloaded experts.
    The test needs its own process, because vLLM cannot load experts in a process that has had a dense model."""
    (found,) = run_ranks(1, experts_beside_the_embedded_engine)
    assert found[0] != found[1]
    for tokens, expected, apart in found:
        assert tokens == expected
        assert apart < 1e-4


def on_two_ranks(backend_name: str, tensor_parallel: int, folder: Path) -> dict[str, Any]:
    """Return samples from sharded weights: first with requests on all ranks, then only on the last rank."""
    model, tokenizer = policy("own head"), AutoTokenizer.from_pretrained(TINY_POLICY)
    engine = build(model, tokenizer, folder, tensor_model_parallel_size=tensor_parallel)
    backend = build_backend(
        model,
        BackendConfig(name="deepspeed", zero_stage=3) if backend_name == "zero3" else BackendConfig(),
        CPU,
        Training(OptimConfig(), grad_clip=1.0, total_optimizer_steps=1),
    )
    engine.update_weights(backend.full_tensors, 1)
    own = requests(tokenizer)[dist.get_rank() :: 2]
    both = sampled(engine, own, GREEDY, 2, seed=1, step=1) + sampled(engine, own, RANDOM, 3, seed=1, step=1)
    one = sampled(engine, own if dist.get_rank() else [], RANDOM, 3, seed=1, step=1)
    scratch = engine._scratch.folder
    here = [path.name for path in scratch.iterdir()]
    engine.close()
    return {
        "sockets": here,
        "scratch": str(scratch),
        "both": [(s.uid, s.sample, s.token_ids.tolist()) for s in both],
        "one": [(s.uid, s.sample, s.token_ids.tolist()) for s in one],
    }


def fsdp2_and_an_engine_each(folder: Path) -> dict[str, Any]:
    return on_two_ranks("fsdp2", 1, folder)


def zero3_and_an_engine_for_both(folder: Path) -> dict[str, Any]:
    return on_two_ranks("zero3", 2, folder)


@pytest.mark.parametrize("function", [fsdp2_and_an_engine_each, zero3_and_an_engine_for_both])
def test_two_ranks_have_an_engine_each_or_share_one(function, tmp_path):
    before = set(SHARED_MEMORY.iterdir())
    results = run_ranks(2, partial(function, tmp_path / "model"))
    # vLLM creates its shared memory anew at each start, so nothing would remove a leftover.
    assert [path for path in set(SHARED_MEMORY.iterdir()) - before if "cpushm" in path.name] == []
    assert any(result["sockets"] for result in results) == (function is zero3_and_an_engine_for_both)
    scratches = [Path(result["scratch"]) for result in results]
    assert not [folder for folder in scratches if folder.exists() or list(SHARED_MEMORY.glob(f"*{folder.name}*"))]
    model, tokenizer = policy("own head"), tiny_tokenizer()
    embedded = build_embedded_engine(model, tokenizer, RolloutConfig())
    for rank, result in enumerate(results):
        own = requests(tokenizer)[rank::2]
        greedy, drawn = result["both"][: 2 * len(own)], result["both"][2 * len(own) :]
        expected = sampled(embedded, own, GREEDY, 2, seed=1, step=1)
        assert greedy == [(s.uid, s.sample, s.token_ids.tolist()) for s in expected]
        assert [(uid, sample) for uid, sample, _ in drawn] == [(r.uid, i) for r in own for i in range(3)]
        assert result["one"] == (drawn if rank else [])


def test_what_a_sleep_loses_beside_weights_and_buffers_comes_back(pair: Pair):
    """A CPU's engine cannot sleep, so the values are overwritten here."""
    before = [sample.token_ids.tolist() for sample in pair.sampled(GREEDY)]
    model = pair.vllm._model()
    for layer in model.model.layers:  # as models that keep tables outside buffers do
        layer.table = layer.input_layernorm.weight.detach().clone()
    saved, hidden = HiddenTensors(model), hidden_tensors(model)
    values = [tensor.clone() for tensor in hidden]
    assert len(hidden) >= len(model.model.layers)
    for tensor in hidden:
        tensor.zero_()
    saved.restore()
    assert all(torch.equal(tensor, value) for tensor, value in zip(hidden, values, strict=True))
    assert [sample.token_ids.tolist() for sample in pair.sampled(GREEDY)] == before
