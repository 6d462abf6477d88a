"""Profiles of the kill campaigns: settings, and the windows that only a profile has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

ON_EVERY_RANK = ("rollout.before", "rollout.after", "update.mid", "commit.file_write", "commit.fsync")
ON_THE_LEADER = (
    "metrics.after",
    "commit.manifest",
    "commit.rename",
    "commit.pointer",
    "commit.published",
    "commit.prune",
    "commit.trash",
)
SAVE_FREQ = 2
SERVER_KILLED, NETWORK_CUT = "server.killed", "network.cut"
IN_GENERATION = "rollout.begin"
"""The event shortly after which windows of servers happen."""


@dataclass(frozen=True)
class Profile:
    """Settings of a run and the windows that only this kind of run has. `spare` is the number of checkpoints added
    to the run's length so that rare windows occur. `random_steps` is the length of each run with --random. The profile
    needs `packages`. `scripted`: its vLLM servers are scripted."""

    settings: tuple[str, ...]
    on_every_rank: tuple[str, ...] = ()
    on_the_leader: tuple[str, ...] = ()
    spare: int = 4
    random_steps: int = 120
    packages: tuple[str, ...] = ()
    scripted: bool = False

    @property
    def windows(self) -> tuple[str, ...]:
        """Return the windows of the profile: first those that other profiles lack, then the common ones."""
        return self.on_every_rank + self.on_the_leader + ON_EVERY_RANK + ON_THE_LEADER

    def windows_of(self, kills: int, seed: int) -> tuple[str, ...]:
        """Return the windows that `kills` kills hit."""
        own, others = self.on_every_rank + self.on_the_leader, ON_EVERY_RANK + ON_THE_LEADER
        left = kills - len(own)
        if left >= len(others):
            return self.windows
        return own[:kills] + tuple(others[((seed - 1) * left + i) % len(others)] for i in range(left))


_OF_SERVERS = (
    "rollout=vllm_server",
    "rollout.servers.count=2",
    "rollout.engine_kwargs.vllm={kv_cache_memory_bytes: 67108864}",
)
_SERVER_WINDOWS: Any = {"on_every_rank": (IN_GENERATION,), "on_the_leader": (SERVER_KILLED, NETWORK_CUT)}

PROFILES = {
    # The entropy bonus changes with every optimizer step.
    "grpo": Profile(
        ("actor.use_kl_loss=true", "actor.entropy_ctrl.type=adaptive", "actor.entropy_ctrl.target_entropy=1.0")
    ),
    # A critic with warm-up, an adaptive KL coefficient, and a running normalization of rewards.
    "ppo": Profile(
        (
            "algorithm=ppo",
            "algorithm.normalize_reward=running",
            "algorithm.lam=0.9",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.kl_coef=0.05",
            "algorithm.kl_ctrl.target_kl=0.01",
            "algorithm.kl_ctrl.horizon=100",
            "trainer.critic_warmup=2",
            "critic.ppo_epochs=2",
            "critic.optim.lr=1e-3",
            "critic.optim.lr_scheduler_type=linear",
            "critic.optim.lr_scheduler_interval=training_step",
        )
    ),
    # A step generates more prompts than it trains on, so almost every step carries groups over. Sampling, masks,
    # filters and penalties differ from the other profiles.
    "dapo": Profile(
        (
            "algorithm=dapo",
            "actor.policy_loss.loss_mode=clip_cov",
            "actor.policy_loss.clip_cov_ratio=0.2",
            "actor.policy_loss.clip_cov_lb=0.01",
            "data.gen_batch_size=6",
            "reward.overlong_buffer.len=2",
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.mask_truncated_responses=true",
            "actor.shuffle=true",
            "rollout.min_p=0.02",
            "rollout.repetition_penalty=1.05",
        )
    ),
    # Saves at steps 2, 4, 6 ... and a moving reference at 3, 6, 9 ...: some saves write the reference, others link it.
    "ema": Profile(
        ("actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "ref.update_freq=3", "ref.alpha=0.5"),
        on_every_rank=("reference.update",),
        on_the_leader=("commit.link",),
        spare=12,
    ),
    # Guards reject batches whose reward is far below the average. Batches are so small here that some are rejected.
    "rollback": Profile(
        (
            "actor.use_kl_loss=true",
            "actor.entropy_ctrl.type=adaptive",
            "guards.action=rollback",
            "guards.max_reward_drop=0.12",
            "guards.max_events=100",
        ),
        on_every_rank=("rollback.before", "rollback.after"),
        spare=16,
    ),
    # A snapshot in memory after each step, and a moving reference, which some snapshots link.
    "memory": Profile(
        (
            "checkpoint.memory.freq=1",
            "actor.use_kl_loss=true",
            "actor.entropy_ctrl.type=adaptive",
            "ref.update_freq=3",
            "ref.alpha=0.5",
        ),
        on_every_rank=("memory.snapshot", "memory.before", "memory.after"),
        spare=12,
    ),
    # Adapters beside frozen weights, the reference in the same module, and dropout, which uses the generators.
    "lora": Profile(
        (
            "actor.use_kl_loss=true",
            "model.lora.enabled=true",
            "model.lora.rank=8",
            "model.lora.dropout=0.1",
            "actor.optim.lr=2e-3",
            "checkpoint.contents=[model,optimizer,extra]",
        ),
        packages=("peft",),
    ),
    # Two more rewards in reward processes: one scores a sample, one all samples of a prompt.
    "rewards": Profile(
        (
            "reward.functions=[reasoning_gym,tests/support/graded.py:nearness,tests/support/graded.py:others]",
            "reward.weights=[1,0.5,0.25]",
        ),
        on_every_rank=("reward.scored",),
    ),
    # Some responses are very long, so every save has partial responses. The journal stores them.
    "async": Profile(
        (
            "rollout.async_steps=2",
            "algorithm.rollout_correction.rollout_is=token",
            "rollout.max_num_seqs=64",
            "data.max_response_length=32",
            "rollout.ignore_eos=false",
            "rollout.temperature=1.3",
            "checkpoint.journal=true",
        ),
    ),
    # The masks of samples are in the journal, in carried groups and in samples in flight.
    "masks": Profile(
        (
            "rollout.top_k=12",
            "rollout.top_p=0.95",
            "rollout.min_p=0.001",
            "rollout.sampling_mask=true",
            "algorithm.filter_groups.enable=true",
            "data.gen_batch_size=6",
            "rollout.async_steps=1",
            "algorithm.rollout_correction.rollout_is=token",
            "rollout.max_num_seqs=64",
            "data.max_response_length=32",
            "rollout.ignore_eos=false",
            "rollout.temperature=1.3",
            "checkpoint.journal=true",
            "actor.use_kl_loss=true",
            "actor.entropy_coeff=0.01",
            "actor.shuffle=true",
        ),
    ),
    # Episodes of up to three turns, with an environment that is restored from its attributes.
    "env": Profile(
        (
            "env.classes=[tests/support/logged_calls.py:Sums]",
            "env.max_turns=3",
            "data.max_response_length=32",
        ),
        on_every_rank=("env.answered", "env.recorded", "env.turn"),
    ),
    # The same as a program that calls the model. After a kill it starts again, with the recorded answers.
    "agent": Profile(
        (
            "env.command='python tests/support/chat_agent.py sums'",
            "env.max_turns=3",
            "data.max_response_length=32",
            "checkpoint.journal=true",
        ),
        on_every_rank=("env.answered", "env.recorded", "env.turn"),
    ),
    # Two vLLM servers, on machines that have vLLM. One is killed in a generation, and connections are cut.
    "servers": Profile(_OF_SERVERS, **_SERVER_WINDOWS, random_steps=20, packages=("vllm",)),
    # The same with scripted servers, on machines without vLLM.
    "scripted_servers": Profile(_OF_SERVERS, **_SERVER_WINDOWS, random_steps=20, scripted=True),
}


def overrides(folder: Path, name: str, steps: int, nproc: int, profile: Profile) -> list[str]:
    """Return the settings of a small run that uses all state of a checkpoint: epochs, mini-batches, a schedule."""
    return [
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={name}",
        f"trainer.nproc={nproc}",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={SAVE_FREQ}",
        "trainer.test_freq=3",
        "trainer.device=cpu",
        "trainer.threads_per_rank=1",
        "checkpoint.max_to_keep=2",
        "data.train_batch_size=4",
        "data.reasoning_gym.train_size=30",
        "data.reasoning_gym.val_size=8",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_epochs=2",
        "actor.optim.lr_scheduler_type=cosine",
        "actor.optim.lr_warmup_steps=3",
        *profile.settings,
    ]
