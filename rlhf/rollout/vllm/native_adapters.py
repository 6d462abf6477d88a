"""Serves adapters with vLLM in the ranks' own processes; the base weights are loaded once."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf.config import LoraConfig, RolloutConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout.engine import Weights
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.vllm.adapter_tensors import (
    adapter_digests,
    adapter_settings,
    copies,
    replace_adapters,
    vllm_arguments,
)
from rlhf.rollout.vllm.colocated import VllmEngine
from rlhf.rollout.vllm.engine_start import build_vllm_engine


class AdapterVllmEngine(VllmEngine):
    """A `VllmEngine` that keeps the frozen base and applies the policy's adapters to each request.

    Each update replaces the adapters by new adapters, in the engine's precision and with a new number. The update then
    verifies the adapters, and the base that the first update sent.
    """

    def __init__(self, *arguments: Any, lora: LoraConfig, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._lora = lora
        self._base_sent: dict[str, Tensor] = {}
        self._number = 0

    def update_adapters(self, base: Weights, adapters: Weights, version: int) -> None:
        """Load adapters, and at the first call their base. Collective, because all ranks gather the weights.

        Args:
            base: frozen weights by their names without adapters.
            adapters: `X.lora_A.weight` and `X.lora_B.weight` for each adapted weight `X.weight`.

        Raises:
            UserError: vLLM serves no adapters for one of these weights.
            ValueError: as in `update_weights`, if the base does not fit the model.
            WeightsMismatch: vLLM's base or adapters differ afterwards.
        """
        with self._process_state.entered(), torch.no_grad():
            self._wake("weights")
            if not self._base_sent:
                self._load_all(base)
                self._base_sent = self._sent
            found = copies(adapters(), self.dtype)
            self._sent = self._base_sent | adapter_digests(found, self._lora, self.dtype)
            self._number += 1
            self._llm.collective_rpc(self._replace_adapters, args=(found,))
            self._verify(version)
            self._llm.reset_prefix_cache()
        self.version = version

    def _lora_request(self) -> Any:
        from vllm.lora.request import LoRARequest

        # vLLM finds the adapters of `_replace_adapters` by this number, and reads no files.
        return LoRARequest(f"policy {self._number}", self._number, "in memory")

    def _replace_adapters(self, worker: Any, adapters: Mapping[str, Tensor]) -> None:
        manager = worker.model_runner.lora_manager._adapter_manager
        replace_adapters(manager, self._number, adapter_settings(self._lora), adapters, self.dtype)


def build_adapter_engine(
    lora: LoraConfig,
    config: RolloutConfig,
    policy: PolicyFiles,
    coordinator: Coordinator,
    device: torch.device,
    *,
    seed: int,
) -> AdapterVllmEngine:
    """Build an `AdapterVllmEngine` as `build_vllm_engine` does. Collective.

    The engine keeps its weights while it sleeps, because the base is not sent again. Raises UserError if vLLM rejects
    the model or the arguments.
    """
    of_vllm = replace(config.engine_kwargs, vllm=vllm_arguments(lora, config))
    config = replace(config, sleep_level=min(1, config.sleep_level), engine_kwargs=of_vllm)
    engine_class = partial(AdapterVllmEngine, lora=lora)
    engine = build_vllm_engine(config, policy, coordinator, device, seed=seed, engine_class=engine_class)
    assert isinstance(engine, AdapterVllmEngine)
    return engine
