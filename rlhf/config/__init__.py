"""The schema: one dataclass module per conf/ group. Nothing here imports torch, so that a typo is answered in a second."""

from dataclasses import dataclass, field
from pathlib import Path

from rlhf.config.actor import ActorConfig, OptimConfig
from rlhf.config.algorithm import AlgorithmConfig
from rlhf.config.backend import BackendConfig
from rlhf.config.checkpoint import CheckpointConfig
from rlhf.config.data import DataConfig, ReasoningGymConfig
from rlhf.config.model import ModelConfig
from rlhf.config.reward import RewardConfig
from rlhf.config.rollout import RolloutConfig, ValKwargsConfig
from rlhf.config.tracking import TrackingConfig, WandbConfig
from rlhf.config.trainer import TrainerConfig


@dataclass
class Config:
    """The whole resolved configuration of a run."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def run_dir(self) -> Path:
        """The deterministic run directory: the same command finds its own checkpoints."""
        t = self.trainer
        return Path(t.default_local_dir).expanduser().absolute() / t.project_name / t.experiment_name


__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "BackendConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ReasoningGymConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrackingConfig",
    "TrainerConfig",
    "ValKwargsConfig",
    "WandbConfig",
]
