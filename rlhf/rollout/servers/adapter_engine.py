"""Samples from vLLM servers that keep the frozen base and receive only the policy's adapters."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from rlhf.config import LoraConfig, RolloutConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout.engine import Weights
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.servers.server_engine import ServerEngine, build_server_engine
from rlhf.rollout.servers.weights.adapter_push import AdapterPush, base_name, has_base
from rlhf.rollout.servers.weights.push import Pushed
from rlhf.rollout.vllm.adapter_tensors import vllm_arguments, vllm_rank
from rlhf.storage.file_parts import FileParts

log = logging.getLogger(__name__)


class AdapterServerEngine(ServerEngine):
    """A `ServerEngine` that implements `AdapterEngine`.

    It sends the base to each server whose label does not name the base, for example after the server's restart.
    """

    _base: Weights | None = None
    _base_label = ""

    def update_adapters(self, base: Weights, adapters: Weights, version: int) -> None:
        """Push adapters, and their base where it is missing. Later calls must have the first call's base."""
        if self._base is None:
            self._base = base
            self._base_label = self._walk(base, lambda _, tensors: self._adapters.read_base(tensors, self._run_id), "")
        name = f"{self._run_id}.step_{version}"
        self._label = self._walk(adapters, lambda _, tensors: self._adapters.read_adapters(tensors, name), "")
        self._version = version
        self._push()

    @property
    def _adapters(self) -> AdapterPush:
        """The `AdapterPush`, which only the leader has."""
        assert isinstance(self._weight_push, AdapterPush)
        return self._weight_push

    def _send_weights(self, labels: Mapping[str, str], name: str) -> Pushed:
        errors: dict[str, str | None] = {}
        if without := [url for url, label in labels.items() if not has_base(label, self._base_label)]:
            log.info("Sending the base of the adapters to the rollout servers %s.", ", ".join(without))
            base = base_name(self._run_id)
            pushed = self._walk(self._base, lambda push, tensors: push.send(without, tensors, base), Pushed("", {}))
            assert pushed.label == self._base_label, "the base has changed"
            errors = {url: error for url, error in pushed.errors.items() if error is not None}
        ready = {url: label for url, label in labels.items() if url not in errors}
        return Pushed(self._label, errors | self._on_leader(lambda _: self._adapters.send_adapters(ready)))


def build_adapter_server_engine(
    lora: LoraConfig,
    config: RolloutConfig,
    policy: PolicyFiles,
    coordinator: Coordinator,
    device: torch.device,
    *,
    logs: Path,
    run_id: str,
    parts: FileParts | None = None,
) -> AdapterServerEngine:
    """Build an `AdapterServerEngine` as `build_server_engine` does. Collective.

    Raises:
        UserError: as in `build_server_engine`, or if a server in `rollout.servers.urls` serves no adapters.
    """
    engine = build_server_engine(
        replace(config, engine_kwargs=replace(config.engine_kwargs, vllm=vllm_arguments(lora, config))),
        policy,
        coordinator,
        device,
        logs=logs,
        run_id=run_id,
        parts=parts,
        engine_class=AdapterServerEngine,
        push_class=partial(AdapterPush, lora=lora),
        adapter_rank=vllm_rank(lora),
    )
    assert isinstance(engine, AdapterServerEngine)
    return engine
