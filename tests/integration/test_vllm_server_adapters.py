"""Compares a base and adapters pushed to a real vLLM server with the merged model in the embedded engine."""

import copy
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.config import LoraConfig, RolloutConfig
from rlhf.errors import UserError
from rlhf.models.adapter_config import PREFIX
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.embedded import build_embedded_engine
from rlhf.rollout.servers.keeper import Keeper
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.server_process import ServerProcess
from rlhf.rollout.servers.weights.adapter_message import AdapterMessage
from rlhf.rollout.servers.weights.adapter_push import AdapterPush, base_name
from rlhf.rollout.servers.weights.push import UNFINISHED
from rlhf.rollout.vllm.adapter_tensors import vllm_arguments
from tests.support.sampled import sampled
from tests.support.tiny_models import TINY_POLICY, tiny_tokenizer
from tests.support.vllm_process import LONGEST

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
]
CPU = torch.device("cpu")
START_S, ANSWER_S, TOKENS = 240.0, 60.0, 16
SECRET = Secret("of-this-run-alone", "here")
LORA = LoraConfig(enabled=True, rank=4, alpha=12.0, use_rslora=True)
PROMPTS = [[5 + i, 7, 9, 11 + i] for i in range(4)]


class Adapted:
    """The bundled policy with random adapters, a server for them, and the trainer's push."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.base = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32).eval()
        settings = PeftConfig(r=4, lora_alpha=12, use_rslora=True, target_modules="all-linear", init_lora_weights=False)
        self.model: Any = get_peft_model(copy.deepcopy(self.base), settings)
        self.config = config = RolloutConfig(max_num_seqs=16)
        config.servers.answer_timeout_s = ANSWER_S
        config.engine_kwargs.vllm = {"kv_cache_memory_bytes": 64 << 20}
        config.engine_kwargs.vllm = vllm_arguments(LORA, config)
        self.log = folder / "server.log"
        self.process = ServerProcess(config, TINY_POLICY, LONGEST, CPU, (), SECRET, self.log, Keeper())
        self.process.start()
        self.push = AdapterPush(config, CPU, SECRET, lora=LORA)
        self.push.read_base(self.base.named_parameters(), "run")

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                self.call("/health")
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < end, self.log.read_text()[-3000:]
                time.sleep(0.1)

    def call(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        headers = SECRET.headers | {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.process.url + path, data, headers), timeout=60) as got:
            return got.read()

    @property
    def label(self) -> str:
        return json.loads(self.call("/weight_info"))["weight_version"]

    def factors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                yield name.removeprefix(PREFIX).replace(".default", ""), parameter.data

    def move(self) -> None:
        for _, tensor in self.factors():
            tensor.mul_(2.0).add_(0.02 * torch.randn_like(tensor))

    def send_base(self) -> None:
        pushed = self.push.send([self.process.url], self.base.named_parameters(), base_name("run"))
        assert pushed.errors == {self.process.url: None}

    def send(self, name: str) -> str | None:
        self.wanted = self.push.read_adapters(self.factors(), name)
        return self.push.send_adapters({self.process.url: self.label})[self.process.url]

    def served(self, label: str) -> list[tuple[list[int], list[float]]]:
        """Return the server's greedy responses and their log-probs."""
        found = []
        for ids in PROMPTS:
            params = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
            answer = self.call("/inference/v1/generate", {"model": label, "token_ids": ids, "sampling_params": params})
            (choice,) = json.loads(answer)["choices"]
            assert {span["version"] for span in choice["weight_versions"]} == {label}
            found.append((choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]))
        return found

    def check(self) -> None:
        """Compare the server with the merged model."""
        assert self.label == self.wanted
        engine = build_embedded_engine(copy.deepcopy(self.model).merge_and_unload(), tiny_tokenizer(), RolloutConfig())
        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        expected = sampled(engine, [Request(i, ids) for i, ids in enumerate(PROMPTS)], greedy, seed=0, step=0)
        for (token_ids, log_probs), sample in zip(self.served(self.wanted), expected, strict=True):
            assert token_ids == sample.token_ids.tolist()
            torch.testing.assert_close(torch.tensor(log_probs), torch.tensor(sample.log_probs), rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    made = Adapted(tmp_path_factory.mktemp("server"))
    try:
        made.wait()
        yield made
    finally:
        made.process.kill()


def test_a_server_applies_the_adapters_of_the_last_push_and_knows_no_others(adapted: Adapted):
    adapted.send_base()
    assert adapted.send("run.step_1") is None
    adapted.check()
    first, before = adapted.wanted, adapted.served(adapted.wanted)
    adapted.move()
    assert adapted.send("run.step_2") is None
    adapted.check()
    assert adapted.served(adapted.wanted) != before
    with pytest.raises(HTTPError, match="404"):
        adapted.served(first)


class Flipped(AdapterMessage):
    """A message whose first tensor has one flipped bit."""

    def encode(self) -> bytes:
        data = bytearray(super().encode())
        data[-1] ^= 1
        return bytes(data)


def test_adapters_or_a_base_that_differ_are_not_served(adapted: Adapted, monkeypatch: pytest.MonkeyPatch):
    adapted.send_base()
    adapted.move()
    with monkeypatch.context() as patched:
        patched.setattr("rlhf.rollout.servers.weights.adapter_push.AdapterMessage", Flipped)
        error = adapted.send("run.step_3")
    assert "does not have the weights that the trainer sent" in (error or "")
    assert adapted.label == UNFINISHED
    with pytest.raises(HTTPError, match="404"):
        adapted.served(adapted.wanted)

    # Another base on the server, such as one that a restart has loaded from files.
    other = ((name, weight + 1 if "norm" in name else weight) for name, weight in adapted.base.named_parameters())
    assert adapted.push.send([adapted.process.url], other, base_name("run")).errors == {adapted.process.url: None}
    assert "input_layer" in (adapted.send("run.step_3") or "")
    assert adapted.label == UNFINISHED

    adapted.send_base()
    assert adapted.send("run.step_3") is None
    adapted.check()


def test_adapters_that_vllm_cannot_serve_end_the_push_with_one_message(adapted: Adapted):
    odd = {"model.layers.0.self_attn.odd.lora_A.weight": torch.ones(4, 8)}
    odd["model.layers.0.self_attn.odd.lora_B.weight"] = torch.ones(8, 4)
    adapted.push.read_adapters(odd.items(), "run.step_4")
    with pytest.raises(UserError, match=r"serves no adapters for .*odd of this model .* Set rollout\.lora=merged"):
        adapted.push.send_adapters({adapted.process.url: adapted.label})
    larger = AdapterPush(adapted.config, CPU, SECRET, lora=LoraConfig(enabled=True, rank=16))
    larger.read_base(adapted.base.named_parameters(), "run")
    larger.read_adapters(adapted.factors(), "run.step_4")
    with pytest.raises(
        UserError, match=r"up to rank 8 \(model.lora.rank=16\). Start the server with a larger --max-lora"
    ):
        larger.send_adapters({adapted.process.url: adapted.label})
