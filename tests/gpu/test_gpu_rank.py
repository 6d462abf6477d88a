"""One rank on a device: samples sent over NCCL (gloo on a CPU), and trained weights given to the engine."""

from collections.abc import Iterator

import pytest
import torch

from rlhf.backends import build_backend
from rlhf.backends.training import Training
from rlhf.config import BackendConfig, OptimConfig, RolloutConfig
from rlhf.learning.resharding import SampleRoute
from rlhf.ranks.collectives import all_to_all
from rlhf.ranks.dims import data
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.embedded import build_embedded_engine
from tests.support.gpus import DEVICES
from tests.support.numeric_ranks import single_rank
from tests.support.sampled import sampled
from tests.support.tiny_models import tiny_tokenizer
from tests.support.tiny_updates import tiny_qwen2

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of the only rank, in a process group of one."""
    cuda = request.param == "cuda"
    with single_rank("cpu:gloo,cuda:nccl" if cuda else "gloo"):
        yield torch.device("cuda", 0) if cuda else torch.device("cpu")


def test_samples_travel_bit_for_bit(device):
    lengths = torch.tensor([3, 0, 5, 1])
    values = torch.randn(4, 5, device=device)
    places = [(0, row) for row in range(4)]
    targets = [(0, row) for row in (2, 0, 3, 1)]
    route = SampleRoute(places, targets, lengths, data())
    moved = route.of_tokens(values)
    assert moved.device == device
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(moved[targets[row][1], :length], values[row, :length])
        assert not moved[targets[row][1], length:].any()
    assert torch.equal(all_to_all(values[0], [5], [5]), values[0])


def test_weights_are_handed_to_the_engine_as_they_are_trained(device):
    model = tiny_qwen2().to(device)
    backend = build_backend(
        model,
        BackendConfig(),
        device,
        Training(OptimConfig(lr=0.1), grad_clip=1.0, total_optimizer_steps=2),
    )
    engine = build_embedded_engine(tiny_qwen2(1), tiny_tokenizer(), RolloutConfig(max_num_seqs=4), device)
    requests = [Request(uid, [5 + uid, 7, 9]) for uid in range(3)]

    def generated(version: int) -> list[list[int]]:
        engine.update_weights(backend.full_tensors, version)
        return [sample.token_ids.tolist() for sample in sampled(engine, requests, GREEDY, seed=1, step=version)]

    def expected() -> list[list[int]]:
        plain = tiny_qwen2(2).to(device)
        plain.load_state_dict(dict(backend.full_tensors()), strict=False)
        other = build_embedded_engine(plain, tiny_tokenizer(), RolloutConfig(max_num_seqs=4), device)
        other.update_weights(lambda: iter(plain.named_parameters()), 0)
        return [sample.token_ids.tolist() for sample in sampled(other, requests, GREEDY, seed=1, step=0)]

    before = {name: tensor.clone() for name, tensor in backend.full_tensors()}
    assert generated(0) == expected()
    ids = torch.tensor([[3, 4, 5, 6]], device=device)
    backend.backward(backend.module(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum())
    backend.optimizer_step()
    after = dict(backend.full_tensors())
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert {tensor.device for tensor in after.values()} == {device}
    assert generated(1) == expected()
