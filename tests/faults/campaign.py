"""python -m tests.faults.campaign --kills N --seed S [--nproc R] [--profile NAME]: does any kill change the result?

Trains once undisturbed. Trains again with N SIGKILLs of ranks and of the supervisor at named events, started again each
time with the same command. Then compares weights, optimizer, RNG, driver state and metric history bit for bit, and
reports which windows were hit. Exit code 0 only when the runs are equal, every window was hit and nothing was left
behind. Saves run behind the training, as they do by default, and kills in their windows find the loop up to two steps
further. Settings at the end of the command are for both runs, such as `checkpoint.async_save=false` or
`backend=deepspeed backend.zero_stage=3 backend.autocast=bfloat16`.

With fewer kills than windows, those of the profile are hit, and as many of the others as there are kills left: the next
ones with each seed, so that campaigns of several seeds hit all of them. A short form, for CI.

Starts are forked from a server that has paid for the imports, but for those of --random, which are of the command
itself.

With --random the kills have no appointment: any process of the tree (supervisor, launcher, ranks, reward processes,
rollout servers), at random instants, by SIGKILL, by SIGSTOP and then SIGKILL, by SIGTERM, or all processes at once.
Runs of one length are killed until N kills have hit, or for --hours H; each is compared with the undisturbed one.
It reports the kills by kind and role, starts and restarts, and how long after a kill the run trained again.
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
# Events of the loop: about two steps, before it has to wait for the save.
LONGEST_AHEAD = 16
LAUNCH_DEADLINE_S = 1800


@dataclass(frozen=True)
class Profile:
    """What is trained, and the windows that only this kind of run has; `spare` checkpoints' worth of steps for rare
    ones to come by; `random_steps` of each run that is killed at random instants."""

    settings: tuple[str, ...]
    on_every_rank: tuple[str, ...] = ()
    on_the_leader: tuple[str, ...] = ()
    spare: int = 4
    random_steps: int = 120

    @property
    def windows(self) -> tuple[str, ...]:
        """Its own first."""
        return self.on_every_rank + self.on_the_leader + ON_EVERY_RANK + ON_THE_LEADER

    def windows_of(self, kills: int, seed: int) -> tuple[str, ...]:
        """The windows that so many kills hit."""
        own, others = self.on_every_rank + self.on_the_leader, ON_EVERY_RANK + ON_THE_LEADER
        left = kills - len(own)
        if left >= len(others):
            return self.windows
        return own[:kills] + tuple(others[((seed - 1) * left + i) % len(others)] for i in range(left))


PROFILES = {
    # And a bonus that moves with every optimizer step.
    "grpo": Profile(
        ("actor.use_kl_loss=true", "actor.entropy_ctrl.type=adaptive", "actor.entropy_ctrl.target_entropy=1.0")
    ),
    # A critic with its warm-up, a coefficient that moves with every batch, and rewards normalised over all so far.
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
    # More prompts per generation than a batch takes, so that groups are carried over almost every step, to be trained
    # on late; and what is drawn, masked, left out and penalised otherwise than in the others.
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
    # Saves at 2, 4, 6 ... and the reference at 3, 6, 9 ...: some saves write the reference, others link it.
    "ema": Profile(
        ("actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "ref.update_freq=3", "ref.alpha=0.5"),
        on_every_rank=("reference.update",),
        on_the_leader=("commit.link",),
        spare=12,
    ),
    # Batches far below the average reward are refused, which on so small batches happens now and then.
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
    # Adapters beside frozen weights, the reference in the same module, and dropout, which draws from the generators.
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
    # Two more rewards from processes of their own: of one sample, and of all that a prompt has.
    "rewards": Profile(
        (
            "reward.functions=[reasoning_gym,tests/support/graded.py:nearness,tests/support/graded.py:others]",
            "reward.weights=[1,0.5,0.25]",
        ),
        on_every_rank=("reward.scored",),
    ),
    # Two servers of ours, on machines that have vLLM.
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
    """A small run in which everything that a checkpoint holds matters: several epochs, mini-batches, a schedule."""
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
    """Every window equally often, in random order, spread over the run; an eighth of the kills hit the supervisor."""
    rng = random.Random(seed)
    windows = profile.windows_of(kills, seed)
    events = [windows[i % len(windows)] for i in range(kills)]
    rng.shuffle(events)
    plan = []
    for number, event in enumerate(events):
        observer = rng.randrange(nproc) if event in ON_EVERY_RANK + profile.on_every_rank else 0
        victim = "supervisor" if rng.random() < 0.125 else str(rng.randrange(nproc) if rng.random() < 0.3 else observer)
        # Retention has something to remove from the third checkpoint on.
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
    """What differs between the two runs, and what was left behind."""
    run_dir = folder / "rlhf" / "killed"
    leftovers = [path.name for path in run_dir.iterdir() if path.name.startswith((TEMPORARY, TRASH))]
    return [f"left behind: {name}" for name in leftovers] + differences(folder / "rlhf" / "undisturbed", run_dir)


def run_campaign(folder: Path, kills: int, seed: int, nproc: int, profile: Profile, more: list[str]) -> list[str]:
    """Returns what is wrong, in lines; empty when no kill changed anything."""
    # A kill lets the run get at most one checkpoint further, so that the last one still finds a run to hit.
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
    # What a kill in a save behind the training has noted.
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
