"""Checks that kills do not change a run.

    python -m tests.faults.campaign --kills N --seed S [--nproc R] [--profile NAME]

Trains once undisturbed. Trains again with N SIGKILLs of ranks and of the supervisor at named events (windows), and
restarts with the same command after each kill. Compares weights, optimizer, RNG, driver state and metric history bit
for bit, and reports which windows were hit. Exits with 0 only if the runs are equal, every window was hit and no
leftover remains. Saves are asynchronous by default, so a kill in a save finds the loop up to two steps ahead. Settings
at the end of the command apply to both runs, such as `checkpoint.async_save=false` or `backend=deepspeed
backend.zero_stage=3 backend.autocast=bfloat16`.

With fewer kills than windows, the campaign hits all windows of the profile and some of the others. Each seed continues
where the previous seed stopped, so several short campaigns hit all windows.

Starts are forked from a server with the imports done, except with --random.

--random kills any process of the tree (supervisor, launcher, ranks, reward processes, rollout servers) at random
instants: with SIGKILL, with SIGSTOP and then SIGKILL, with SIGTERM, or all processes at once. Runs of a fixed length
follow each other until N kills have hit, or for --hours H. Each is compared with the undisturbed run. The report counts
kills by kind and role, starts and restarts, and the time from a kill to the next trained step.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.resolved import load
from rlhf.events import LISTENER_VARIABLE
from rlhf.storage.layout import RESOLVED, TEMPORARY, TRASH
from tests.faults.random_kills import DisturbedRun, Figures
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.killer import PLAN_VARIABLE

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
# In events of the loop: about two steps, then the loop waits for the save.
LONGEST_AHEAD = 16
LAUNCH_DEADLINE_S = 1800


@dataclass(frozen=True)
class Profile:
    """Settings of a run and the windows that only this kind of run has. `spare` is the number of checkpoints added
    to the run's length so that rare windows occur. `random_steps` is the length of each run with --random."""

    settings: tuple[str, ...]
    on_every_rank: tuple[str, ...] = ()
    on_the_leader: tuple[str, ...] = ()
    spare: int = 4
    random_steps: int = 120

    @property
    def windows(self) -> tuple[str, ...]:
        """Return the profile's windows, its own ones first."""
        return self.on_every_rank + self.on_the_leader + ON_EVERY_RANK + ON_THE_LEADER

    def windows_of(self, kills: int, seed: int) -> tuple[str, ...]:
        """Return the windows that `kills` kills hit."""
        own, others = self.on_every_rank + self.on_the_leader, ON_EVERY_RANK + ON_THE_LEADER
        left = kills - len(own)
        if left >= len(others):
            return self.windows
        return own[:kills] + tuple(others[((seed - 1) * left + i) % len(others)] for i in range(left))


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
    # A generation has more prompts than a batch, so almost every step carries groups over. Sampling, masks, filters and
    # penalties differ from the other profiles.
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
    # Guards reject batches far below the average reward, which such small batches sometimes are.
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
    # Adapters beside frozen weights, the reference in the same module, and dropout, which uses the generators.
    "lora": Profile(
        (
            "actor.use_kl_loss=true",
            "model.lora.enabled=true",
            "model.lora.rank=8",
            "model.lora.dropout=0.1",
            "actor.optim.lr=2e-3",
            "checkpoint.contents=[model,optimizer,extra]",
        )
    ),
    # Two more rewards in reward processes: one scores a sample, one all samples of a prompt.
    "rewards": Profile(
        (
            "reward.functions=[reasoning_gym,tests/support/graded.py:nearness,tests/support/graded.py:others]",
            "reward.weights=[1,0.5,0.25]",
        ),
        on_every_rank=("reward.scored",),
    ),
    # Two vLLM servers, on machines that have vLLM.
    "servers": Profile(
        (
            "rollout=vllm_server",
            "rollout.servers.count=2",
            "rollout.engine_kwargs.vllm={kv_cache_memory_bytes: 67108864}",
        ),
        on_every_rank=("rollout.begin",),
        random_steps=20,
    ),
}


def overrides(folder: Path, name: str, steps: int, nproc: int, profile: Profile) -> list[str]:
    """Return a small run that uses all state of a checkpoint: several epochs, mini-batches, a schedule."""
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


def plan_kills(kills: int, seed: int, nproc: int, steps: int, profile: Profile) -> list[dict]:
    """Plan the kills: every window equally often, in random order, over the whole run. An eighth hit the supervisor."""
    rng = random.Random(seed)
    windows = profile.windows_of(kills, seed)
    events = [windows[i % len(windows)] for i in range(kills)]
    rng.shuffle(events)
    plan = []
    for number, event in enumerate(events):
        observer = rng.randrange(nproc) if event in ON_EVERY_RANK + profile.on_every_rank else 0
        victim = "supervisor" if rng.random() < 0.125 else str(rng.randrange(nproc) if rng.random() < 0.3 else observer)
        # Retention removes checkpoints from the third one on.
        first = 2 * SAVE_FREQ if event in ("commit.prune", "commit.trash") else 0
        after = max(first, int(number / kills * (steps - profile.spare * SAVE_FREQ)))
        kill = {"id": number, "event": event, "observer": observer, "victim": victim, "after_step": after}
        plan.append(kill | {"ahead": number % LONGEST_AHEAD})
    return plan


def launch(arguments: list[str], environment: dict[str, str], log: Path) -> int:
    ended = train_forked(arguments, environment, LAUNCH_DEADLINE_S)
    with log.open("a") as output:
        output.write(ended.output)
    return ended.code


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_at_random(
    folder: Path, kills: int, hours: float | None, steps: int, seed: int, nproc: int, profile: Profile, more: list[str]
) -> list[str]:
    """Returns what is wrong, in lines; empty when no kill changed anything."""
    settings = overrides(folder, "undisturbed", steps, nproc, profile) + more
    if (code := launch(settings, {}, folder / "undisturbed.log")) != 0:
        return [f"the undisturbed run ended with exit code {code}:\n{(folder / 'undisturbed.log').read_text()[-3000:]}"]
    figures, rng, began = Figures(), random.Random(seed), time.monotonic()

    def wanted() -> bool:
        return figures.kills.total() < kills if hours is None else time.monotonic() < began + 3600 * hours

    problems: list[str] = []
    while wanted() and not problems:
        endless = ["trainer.restart_backoff_s=0", "trainer.max_restarts=10000", "trainer.max_failures_per_step=10000"]
        arguments = overrides(folder, "killed", steps, nproc, profile) + endless + more
        shutil.rmtree(folder / "rlhf" / "killed", ignore_errors=True)
        command = [sys.executable, "-m", "rlhf.train", *arguments]
        problems = DisturbedRun(command, folder, rng, figures, wanted).run()
        problems = problems or compared(folder)
        print_line(f"run {figures.runs}: {figures.kills.total()} kills so far, {time.monotonic() - began:.0f} s")
    for line in figures.lines():
        print_line(line)
    return problems


def compared(folder: Path) -> list[str]:
    """Return the differences between the two runs, and leftovers."""
    run_dir = folder / "rlhf" / "killed"
    leftovers = [path.name for path in run_dir.iterdir() if path.name.startswith((TEMPORARY, TRASH))]
    return [f"left behind: {name}" for name in leftovers] + differences(folder / "rlhf" / "undisturbed", run_dir)


def run_campaign(folder: Path, kills: int, seed: int, nproc: int, profile: Profile, more: list[str]) -> list[str]:
    """Returns what is wrong, in lines; empty when no kill changed anything."""
    # Between two kills the run saves at most one checkpoint, so the last kill still hits a running process.
    steps = SAVE_FREQ * (kills + profile.spare)
    started = time.monotonic()
    code = launch(overrides(folder, "undisturbed", steps, nproc, profile) + more, {}, folder / "undisturbed.log")
    if code != 0:
        return [f"the undisturbed run ended with exit code {code}:\n{(folder / 'undisturbed.log').read_text()[-3000:]}"]
    print_line(f"undisturbed: {steps} steps on {nproc} rank(s) in {time.monotonic() - started:.0f} s")

    plan = plan_kills(kills, seed, nproc, steps, profile)
    run_dir = folder / "rlhf" / "killed"
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "run_dir").write_text(str(run_dir))
    environment = {LISTENER_VARIABLE: "tests.support.killer:on_event", PLAN_VARIABLE: str(folder / "plan.json")}
    endless = [
        "trainer.restart_backoff_s=0",
        f"trainer.max_restarts={kills}",
        f"trainer.max_failures_per_step={kills + 1}",
    ]
    arguments = overrides(folder, "killed", steps, nproc, profile) + endless + more
    launches = 0
    while True:
        code = launch(arguments, environment, folder / "killed.log")
        launches += 1
        if code == 0:
            break
        if code != -9 or launches > kills + 1:
            return [
                f"start {launches} of the killed run ended with exit code {code}:\n"
                f"{(folder / 'killed.log').read_text()[-3000:]}"
            ]

    fired = [kill for kill in plan if (folder / f"fired_{kill['id']:04d}").exists()]
    hits = Counter(kill["event"] for kill in fired)
    victims = Counter("supervisor" if kill["victim"] == "supervisor" else "rank" for kill in fired)
    print_line(
        f"killed: {len(fired)} of {kills} kills hit ({dict(victims)}), {launches} start(s), "
        f"{time.monotonic() - started:.0f} s in all"
    )
    windows = [window for window in profile.windows if any(kill["event"] == window for kill in plan)]
    for window in windows:
        print_line(f"  {window:20} {hits[window]}")
    # The steps that a kill in an asynchronous save has noted.
    ahead = [int(text) for kill in fired if (text := (folder / f"fired_{kill['id']:04d}").read_text())]
    print_line(
        f"  in a save behind the training: {len(ahead)}, the loop meanwhile up to {max(ahead, default=0)} events "
        "further"
    )
    problems = [f"window {window} was never hit" for window in windows if not hits[window]]
    if len(fired) < kills:
        problems.append(f"{kills - len(fired)} kills never fired")
    if kills >= len(profile.windows) and load(run_dir / RESOLVED).checkpoint.async_save and not any(ahead):
        problems.append("no kill hit a save while the loop went on")
    if launch(arguments, environment, folder / "killed.log") != 0:
        problems.append("starting the finished run again did not end with exit code 0")
    return problems + compared(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=25, help="in every window with 12 and the profile's own")
    parser.add_argument("--random", action="store_true", help="any process, at random instants, in four ways")
    parser.add_argument("--hours", type=float, help="with --random: so long, instead of so many kills")
    parser.add_argument("--steps", type=int, help="with --random: of each run, where not as many as the profile says")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nproc", type=int, default=1, help="ranks")
    parser.add_argument("--profile", choices=PROFILES, default="grpo", help="what is trained")
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    parser.add_argument("overrides", nargs="*", help="settings for both runs, as for rlhf.train")
    arguments = parser.parse_args()
    profile = PROFILES[arguments.profile]
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="rlhf-campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder, of_both = folder.absolute(), (arguments.seed, arguments.nproc, profile, arguments.overrides)
    if arguments.random:
        steps = arguments.steps or profile.random_steps
        problems = run_at_random(folder, arguments.kills, arguments.hours, steps, *of_both)
    else:
        problems = run_campaign(folder, arguments.kills, *of_both)
    for problem in problems:
        sys.stdout.write(f"FAILED: {problem}\n")
    if not problems:
        sys.stdout.write("Every killed run equals the undisturbed one bit for bit.\n")
        if arguments.keep is None:
            shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
