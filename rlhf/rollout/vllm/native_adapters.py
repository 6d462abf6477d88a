"""Serves adapters with vLLM in the ranks' own processes; the base weights are loaded once."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf.config import LoraConfig, RolloutConfig
from rlhf.errors import UserError
from rlhf.models.adapter_config import PREFIX
from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout.engine import Weights
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.vllm.colocated import VllmEngine
from rlhf.rollout.vllm.engine_start import build_vllm_engine
from rlhf.rollout.vllm.model_digests import FACTORS
from rlhf.rollout.weight_digest import digest

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's `max_lora_rank`


class AdapterVllmEngine(VllmEngine):
    """A `VllmEngine` that keeps the frozen base and applies the policy's adapters to each request.

    Each update replaces the adapters by new adapters, in the engine's precision and with a new number. The update then
    verifies the adapters, and the base that the first update sent.
    """

    def __init__(self, *arguments: Any, lora: LoraConfig, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # As in adapter_config.json, but without layers: vLLM finds them by the tensors' names.
        self._settings = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora, "target_modules": []}
        self._scaling = lora.alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)
        self._base_sent: dict[str, Tensor] = {}
        self._number = 0

    def update_adapters(self, base: Weights, adapters: Weights, version: int) -> None:
        """Load adapters, and at the first call their base. Collective, as iterating the weights is.

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
            # Copy the tensors, because vLLM multiplies them by the scale in place.
            found = {name: tensor.detach().to("cpu", self.dtype, copy=True) for name, tensor in adapters()}
            self._sent = self._base_sent | {self._digest_name(n): self._digest(n, t) for n, t in found.items()}
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
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = worker.model_runner.lora_manager._adapter_manager
        helper = PEFTHelper.from_dict(dict(self._settings))
        helper.validate_legal(manager.lora_config)
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            self._number,
            {PREFIX + name: tensor for name, tensor in adapters.items()},
            helper,
            device="cpu",
            dtype=self.dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager.remove_all_adapters()
        manager.add_adapter(adapter)
        # vLLM silently ignores adapters of unknown layers.
        if unserved := sorted(adapter.loras.keys() - manager.modules.keys()):
            raise UserError(
                f"rollout.lora=native: vLLM serves no adapters for {', '.join(unserved[:3])} of this model "
                f"({len(unserved)} in all). Set rollout.lora=merged."
            )
        manager.activate_adapter(self._number)

    def _digest_name(self, name: str) -> str:
        for end, factor in FACTORS.items():
            name = name.replace(f".{end}.weight", f".{factor}")
        return name

    def _digest(self, name: str, tensor: Tensor) -> Tensor:
        """Return the digest of a factor as vLLM stores it: vLLM multiplies lora_B by the scale."""
        scaled = tensor if "lora_A" in name or self._scaling == 1 else tensor * self._scaling
        return digest(scaled, self.dtype)


def build_adapter_engine(
    lora: LoraConfig,
    config: RolloutConfig,
    policy: PolicyFiles,
    coordinator: Coordinator,
    device: torch.device,
    *,
    seed: int,
) -> AdapterVllmEngine:
    """Build an `AdapterVllmEngine` as `build_vllm_engine` does. Collective. The engine keeps its weights while it
    sleeps, since the base is not sent again. Raises UserError if vLLM rejects the model or the arguments."""
    rank = next(allowed for allowed in RANKS if lora.rank <= allowed)
    ours = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
    of_vllm = replace(config.engine_kwargs, vllm=ours | config.engine_kwargs.vllm)
    config = replace(config, sleep_level=min(1, config.sleep_level), engine_kwargs=of_vllm)
    engine_class = partial(AdapterVllmEngine, lora=lora)
    engine = build_vllm_engine(config, policy, coordinator, device, seed=seed, engine_class=engine_class)
    assert isinstance(engine, AdapterVllmEngine)
    return engine
