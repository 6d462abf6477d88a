"""After the first sleep that releases weights, the engine's log-probs are compared with the trainer's."""

from typing import Any

import pytest
import torch
from torch import nn

from rlhf.config.schema.rollout import RolloutConfig
from rlhf.errors import UserError
from rlhf.experience.engine_probe import PROMPT, RESPONSE, probe_request
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.embedded import build_embedded_engine
from tests.support.engines import make_engine
from tests.support.numeric_ranks import single_rank
from tests.support.refusals import says
from tests.support.tiny_models import tiny_tokenizer
from tests.support.tiny_updates import tiny_qwen2

REQUEST = Request(3, [5, 6, 7], SamplingParams(max_tokens=4))


class Watched:
    """An embedded engine that records its calls. Its sleep reports `releases`: whether it released the weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, releases: bool) -> None:
        self.engine: Any = build_embedded_engine(tiny_qwen2(1), tiny_tokenizer(), RolloutConfig())
        self.calls: list[str] = []
        for name in ("update_weights", "generate"):
            monkeypatch.setattr(self.engine, name, self._noting(name, getattr(self.engine, name)))
        monkeypatch.setattr(self.engine, "sleep", self._noting("sleep", lambda: releases))

    def _noting(self, name: str, call: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            self.calls.append(name)
            return call(*arguments, **named)

        return noted


def sampler_of(engine: Any, seed: int = 1) -> PolicySampler:
    return PolicySampler(engine, make_engine("fsdp2", seed), seed=0)


def test_an_engine_that_keeps_its_tensors_is_probed_once(monkeypatch: pytest.MonkeyPatch):
    with single_rank():
        expected = sampler_of(Watched(monkeypatch, False).engine).generate([REQUEST], version=2, step=3)
        watched = Watched(monkeypatch, True)
        sampler = sampler_of(watched.engine)
        samples = [sampler.generate([REQUEST], version=2, step=3) for _ in range(2)]
    assert all(found[0].token_ids.tolist() == expected[0].token_ids.tolist() for found in samples)
    probe, own = ["sleep", "update_weights", "generate", "sleep"], ["update_weights", "generate"]
    assert watched.calls == [*probe, *own, "generate"]
    assert len(probe_request().token_ids) == PROMPT
    assert probe_request().params.max_tokens == RESPONSE


def test_an_engine_that_keeps_its_weights_in_sleep_is_not_probed(monkeypatch: pytest.MonkeyPatch):
    watched = Watched(monkeypatch, False)
    with single_rank():
        sampler_of(watched.engine).generate([], version=0, step=1)
    assert watched.calls == ["sleep", "update_weights", "generate"]


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_lost_tensors_end_the_run_with_the_remedy(monkeypatch: pytest.MonkeyPatch, value: float):
    engine = Watched(monkeypatch, True).engine
    lost: nn.Module = engine.model.model.rotary_emb
    lost.inv_freq.fill_(value)
    with single_rank(), pytest.raises(UserError) as error:
        sampler_of(engine).generate([REQUEST], version=0, step=1)
    says(str(error.value), "rollout.sleep_level=2", "0.25", "rollout.sleep_level=1")
