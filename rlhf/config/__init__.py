"""Defines the configuration's schema, one dataclass per section. Imports no torch, to report a typo within a second."""

from dataclasses import dataclass, field
from pathlib import Path

from rlhf.config.schema.actor import ActorConfig, EntropyCtrlConfig, PolicyLossConfig
from rlhf.config.schema.algorithm import AlgorithmConfig, FilterGroupsConfig, KlCtrlConfig, RolloutCorrectionConfig
from rlhf.config.schema.backend import BackendConfig
from rlhf.config.schema.checkpoint import CheckpointConfig, MemoryConfig
from rlhf.config.schema.critic import CriticConfig
from rlhf.config.schema.data import DataConfig, ReasoningGymConfig
from rlhf.config.schema.env import EnvConfig
from rlhf.config.schema.fsdp import FrozenFsdpConfig, TrainedFsdpConfig
from rlhf.config.schema.guards import GuardsConfig
from rlhf.config.schema.launcher import LauncherConfig
from rlhf.config.schema.lora import LoraConfig
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.optim import OptimConfig
from rlhf.config.schema.ref import RefConfig
from rlhf.config.schema.reward import OverlongBufferConfig, RewardConfig
from rlhf.config.schema.reward_model import RewardModelConfig
from rlhf.config.schema.rollout import EngineKwargsConfig, RolloutConfig, ServersConfig, ValKwargsConfig
from rlhf.config.schema.tracking import AlertsConfig, MlflowConfig, TrackingConfig, WandbConfig
from rlhf.config.schema.trainer import TrainerConfig


@dataclass(frozen=True)
class TokenBudgets:
    """Tokens per pass of each model on one rank; a longer sample gets a pass of its own."""

    actor: int
    old_log_probs: int
    reference: int
    critic: int
    values: int
    reward_model: int


@dataclass
class Config:
    """The whole resolved configuration of a run."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        # If user code changes the working directory later, the run must not write into another run's directory.
        self._working_dir = Path.cwd()

    @property
    def run_dir(self) -> Path:
        """Return the run directory. Settings and working directory determine it, so the same command finds it again."""
        t = self.trainer
        return self._working_dir / Path(t.default_local_dir).expanduser() / t.project_name / t.experiment_name

    @property
    def token_budgets(self) -> TokenBudgets:
        """Return the token budgets of all passes. A budget that is null takes the actor's or the critic's budget."""
        actor = self.actor.ppo_max_token_len_per_gpu
        critic = self.critic.ppo_max_token_len_per_gpu or actor
        return TokenBudgets(
            actor=actor,
            old_log_probs=self.rollout.log_prob_max_token_len_per_gpu or actor,
            reference=self.ref.log_prob_max_token_len_per_gpu or actor,
            critic=critic,
            values=self.critic.forward_max_token_len_per_gpu or critic,
            reward_model=self.reward_model.forward_max_token_len_per_gpu,
        )
