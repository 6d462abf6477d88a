"""Finds the files of a run's models, and checks their tokenizers, before any weights are loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config import CriticConfig, LoraConfig, ModelConfig, RewardModelConfig
from rlhf.errors import UserError
from rlhf.models import loading, weights
from rlhf.models.adapter_folder import WEIGHTS
from rlhf.models.adapter_layers import Adapters, add_adapters
from rlhf.models.adapter_start import check_adapter_tensors
from rlhf.models.loading import ModelSource, ModelStart
from rlhf.models.model_files import ModelFiles, find_files
from rlhf.models.weights import PendingModel
from rlhf.ranks.coordinator import Coordinator


@dataclass(frozen=True)
class ResolvedModel:
    """Files, architecture and tokenizer of one model."""

    files: ModelFiles
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase

    def load(
        self, function: Callable[..., PreTrainedModel], coordinator: Coordinator, device: torch.device
    ) -> PendingModel:
        """Load the model with `function`, a `load_...` of `rlhf.models.loading`. Collective."""
        load_from = partial(function, ModelStart(self.files.source, self.files.folder, self.hf_config))
        return weights.load(self.files, self.hf_config, load_from, coordinator, device)

    def check_adapters(self, lora: LoraConfig) -> None:
        """Raise UserError if the adapters of `lora` or in `lora.path` do not fit the model. Reads no weights."""
        model = loading.empty_model(self.files.source, self.hf_config)
        add_adapters(model, lora, torch.float32)
        folder = None if lora.path is None else Path(lora.path).expanduser()
        if folder is not None and (folder / WEIGHTS).is_file():  # a run with a checkpoint does not need the folder
            adapters = Adapters.of(model)
            assert adapters is not None
            shapes = {name: p.shape for name, p in adapters.trained(model.named_parameters())}
            check_adapter_tensors(shapes, folder)


@dataclass(frozen=True)
class ModelSources:
    """The models that a run needs. Without `critic.path` the critic starts from the policy's files."""

    policy: ResolvedModel
    critic: ResolvedModel | None
    reward_model: ResolvedModel | None

    @property
    def fingerprints(self) -> dict[str, str]:
        found = [m for m in (self.policy, self.critic, self.reward_model) if m is not None]
        code = "".join(m.files.code_fingerprint for m in found)
        files = {m.files.source.setting: m.files.fingerprint for m in found}
        return files | ({"model.trust_remote_code": xxhash.xxh3_128_hexdigest(code.encode())} if code else {})


def model_source(
    setting: str, path: str, revision: str | None, model: ModelConfig, chat_template: str | None = None
) -> ModelSource:
    """Return the source of the model that `setting` names, with the options of the section `model`."""
    return ModelSource(setting, path, revision, model.trust_remote_code, model.attn_implementation, chat_template)


def resolve_models(
    model: ModelConfig,
    critic: CriticConfig | None,
    reward_model: RewardModelConfig | None,
    coordinator: Coordinator,
    device: torch.device,
    scratch: Path,
) -> ModelSources:
    """Find the models of the run, and copy small files below `scratch`. Collective.

    Args:
        critic, reward_model: None if the run needs no critic or no reward model.

    Raises:
        UserError: a model cannot be found or read, or the critic has another vocabulary than the policy.
    """

    def find(source: ModelSource) -> ResolvedModel:
        files = find_files(source, model.loading, coordinator, device, scratch)
        hf_config = loading.load_model_config(files.source, files.folder)
        return ResolvedModel(files, hf_config, loading.load_tokenizer(files.source, files.folder))

    policy = find(model_source("model.path", model.path, model.revision, model, model.chat_template))
    values, judge = None, None
    if critic is not None:
        values = policy if critic.path is None else find(model_source("critic.path", critic.path, None, model))
    if reward_model is not None:
        assert reward_model.path is not None
        judge = find(model_source("reward_model.path", reward_model.path, reward_model.revision, model))
    if values is not None and values.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(
            f"{values.files.source} has another vocabulary than {policy.files.source}: the critic reads the policy's "
            "tokens. Set critic.path to a model with the same tokenizer, or to null."
        )
    return ModelSources(policy, values, judge)
