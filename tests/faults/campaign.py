"""Checks that kills do not change a run.

    python -m tests.faults.campaign --kills N --seed S [--nproc R] [--profile NAME]

Trains once undisturbed. Trains again with N SIGKILLs of ranks and of the supervisor at named events (windows), and
restarts with the same command after each kill. The profiles `servers` and `scripted_servers` also kill servers that
generate, and cut the leader's connections to them for seconds. Compares weights, optimizer, RNG, driver state and
metric history bit for bit, and reports which windows were hit. Exits with 0 only if the runs are equal, every window
was hit and no leftover remains. Saves are asynchronous by default, so a kill in a save finds the loop up to two steps
ahead. Settings at the end of the command apply to both runs, such as `checkpoint.async_save=false` or
`backend=deepspeed backend.zero_stage=3 backend.autocast=bfloat16`.

With fewer kills than windows, the campaign hits all windows of the profile and some of the others. Each seed continues
where the previous seed stopped, so several short campaigns hit all windows.

Starts are forked from a server with the imports done, except with --random and --launcher ray.

--launcher ray runs the killed run on a Ray cluster of two nodes on this machine, with one rank each. The kills hit
ranks, Ray's workers, the command, and a node, which is then replaced. The undisturbed run has a supervisor. Ray must be
installed, or $RLHF_RAY_PYTHON name a Python that has it.

--random kills any process of the tree (supervisor, launcher, ranks, reward processes, rollout servers) at random
instants: with SIGKILL, with SIGSTOP and then SIGKILL, with SIGTERM, or all processes at once. Runs of a fixed length
follow each other until N kills have hit. Each is compared with the undisturbed run. The report counts
kills by kind and role, starts and restarts, and the time from a kill to the next trained step.

--hours H runs short campaigns for H hours: each profile (or only --profile) with a few kills at named events, then with
a few at random instants, then all again with the next seed. An hour covers every window and both kinds. The report
names what was covered, and profiles that were skipped because a package is missing.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rlhf.config.resolved import load
from rlhf.events import LISTENER_VARIABLE
from rlhf.storage.layout import RESOLVED, TEMPORARY, TRASH
from tests.faults.cycle import Campaign, Cycle
from tests.faults.launchers import RAY_NODES, Launcher, Local, started
from tests.faults.profiles import (
    IN_GENERATION,
    NETWORK_CUT,
    ON_EVERY_RANK,
    PROFILES,
    SAVE_FREQ,
    SERVER_KILLED,
    Profile,
    overrides,
)
from tests.faults.random_kills import DisturbedRun, Figures
from tests.support import scripted_vllm_package
from tests.support.compare_runs import differences
from tests.support.killer import NETWORK, PLAN_VARIABLE, SERVER

# Events of the loop during one save: about two steps, after which the loop waits for the save.
LONGEST_AHEAD = 16
SCRIPTED_TOKEN_S = 0.02
NAMED, RANDOM = "named events", "random instants"
OF_SERVERS = {SERVER_KILLED: SERVER, NETWORK_CUT: NETWORK}
"""The victims of windows that the ranks survive."""
KILLS_OF_A_TURN = 4
"""In a turn of --hours: number of kills at random instants, and number of kills at windows that all profiles have."""


def plan_kills(kills: int, seed: int, nproc: int, steps: int, profile: Profile) -> list[dict]:
    """Plan the kills: every window equally often, in random order, over the whole run. An eighth hit the supervisor."""
    rng = random.Random(seed)
    windows = profile.windows_of(kills, seed)
    events = [windows[i % len(windows)] for i in range(kills)]
    rng.shuffle(events)
    plan = []
    for number, window in enumerate(events):
        event = IN_GENERATION if window in OF_SERVERS else window
        observer = rng.randrange(nproc) if window in ON_EVERY_RANK + profile.on_every_rank else 0
        victim = "supervisor" if rng.random() < 0.125 else str(rng.randrange(nproc) if rng.random() < 0.3 else observer)
        victim = OF_SERVERS.get(window, victim)
        # Retention removes checkpoints from the third one on.
        first = 2 * SAVE_FREQ if event in ("commit.prune", "commit.trash") else 0
        after = max(first, int(number / kills * (steps - profile.spare * SAVE_FREQ)))
        kill = {"id": number, "event": event, "observer": observer, "victim": victim, "after_step": after}
        plan.append(kill | {"ahead": number % LONGEST_AHEAD, "window": window})
    return plan


def packages_of(profile: Profile, folder: Path) -> dict[str, str]:
    """Return the environment that gives a run its scripted servers, if the profile has them."""
    return scripted_vllm_package.environment(folder / "packages", SCRIPTED_TOKEN_S) if profile.scripted else {}


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_at_random(
    folder: Path, kills: int, steps: int, seed: int, nproc: int, profile: Profile, more: list[str]
) -> list[str]:
    """Kill runs at random instants. Return the problems, one per line; empty if no kill changed a run."""
    settings, packages = overrides(folder, "undisturbed", steps, nproc, profile) + more, packages_of(profile, folder)
    if (code := Local().start(settings, packages, folder / "undisturbed.log")) != 0:
        return [f"the undisturbed run ended with exit code {code}:\n{(folder / 'undisturbed.log').read_text()[-3000:]}"]
    figures, rng, began = Figures(), random.Random(seed), time.monotonic()

    def wanted() -> bool:
        return figures.kills.total() < kills

    problems: list[str] = []
    while wanted() and not problems:
        endless = ["trainer.restart_backoff_s=0", "trainer.max_restarts=10000", "trainer.max_failures_per_step=10000"]
        arguments = overrides(folder, "killed", steps, nproc, profile) + endless + more
        shutil.rmtree(folder / "rlhf" / "killed", ignore_errors=True)
        command = [sys.executable, "-m", "rlhf.train", *arguments]
        problems = DisturbedRun(command, packages, folder, rng, figures, wanted).run()
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


def run_campaign(
    folder: Path, kills: int, seed: int, nproc: int, profile: Profile, more: list[str], launcher: Launcher | None = None
) -> list[str]:
    """Kill a run at named events. Return the problems, one per line; empty if no kill changed the run.

    `launcher` runs the killed run; None means the supervisor.
    """
    # Between two kills the run saves at most one checkpoint, so the last kill still hits a running process.
    steps = SAVE_FREQ * (kills + profile.spare)
    began, packages, launcher = time.monotonic(), packages_of(profile, folder), launcher or Local()
    settings = overrides(folder, "undisturbed", steps, nproc, profile) + more
    code = Local().start(settings, packages, folder / "undisturbed.log")
    if code != 0:
        return [f"the undisturbed run ended with exit code {code}:\n{(folder / 'undisturbed.log').read_text()[-3000:]}"]
    print_line(f"undisturbed: {steps} steps on {nproc} rank(s) in {time.monotonic() - began:.0f} s")

    plan = launcher.victims(plan_kills(kills, seed, nproc, steps, profile))
    run_dir = folder / "rlhf" / "killed"
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "run_dir").write_text(str(run_dir))
    environment = {LISTENER_VARIABLE: "tests.support.killer:on_event", PLAN_VARIABLE: str(folder / "plan.json")}
    environment |= packages
    endless = [
        "trainer.restart_backoff_s=0",
        f"trainer.max_restarts={kills}",
        f"trainer.max_failures_per_step={kills + 1}",
    ]
    arguments = [*overrides(folder, "killed", steps, nproc, profile), *endless, *more, *launcher.settings(nproc, more)]
    launches, problem = start_until_done(launcher, arguments, environment, folder / "killed.log", kills + 2)
    if problem:
        return [problem]

    fired = [kill for kill in plan if (folder / f"fired_{kill['id']:04d}").exists()]
    hits = Counter(kill["window"] for kill in fired)
    victims = Counter(kill["victim"].rstrip("0123456789_") or "rank" for kill in fired)
    print_line(
        f"killed: {len(fired)} of {kills} kills hit ({dict(victims)}), {launches} start(s), "
        f"{time.monotonic() - began:.0f} s in all"
    )
    windows = [window for window in profile.windows if any(kill["window"] == window for kill in plan)]
    for window in windows:
        print_line(f"  {window:20} {hits[window]}")
    # For each kill in an asynchronous save: how many events the loop was ahead of the save.
    ahead = [int(text) for kill in fired if (text := (folder / f"fired_{kill['id']:04d}").read_text())]
    print_line(
        f"  in an asynchronous save: {len(ahead)}, with the loop up to {max(ahead, default=0)} events ahead of the save"
    )
    problems = [f"window {window} was never hit" for window in windows if not hits[window]]
    if len(fired) < kills:
        problems.append(f"{kills - len(fired)} kills never fired")
    crashes = (folder / "killed.log").read_text().count("supervisor: Crash: ")
    if crashes > victims["rank"]:
        problems.append(f"{crashes} crashes, but only {victims['rank']} kills of ranks")
    if kills >= len(profile.windows) and load(run_dir / RESOLVED).checkpoint.async_save and not any(ahead):
        problems.append("no kill hit a save while the loop went on")
    if launcher.start(arguments, environment, folder / "killed.log") != 0:
        problems.append("starting the finished run again did not end with exit code 0")
    return problems + compared(folder)


def start_until_done(
    launcher: Launcher, arguments: list[str], environment: dict[str, str], log: Path, most: int
) -> tuple[int, str]:
    """Start a run, and again after each kill of its command, up to `most` times. Return the number of starts and the
    problem, if the last one did not end with 0."""
    starts, code = 0, -9
    while code == -9 and starts < most:
        code = launcher.start(arguments, environment, log)
        starts += 1
    ended = f"start {starts} of the killed run ended with exit code {code}:\n{log.read_text()[-3000:]}"
    return starts, ended if code else ""


def take_turns(folder: Path, hours: float, seed: int, nproc: int, names: list[str], more: list[str]) -> list[str]:
    """Run short campaigns for `hours`. Return the problems, one per line; empty if no kill changed a run."""

    def campaigns(profile: Profile) -> dict[str, Campaign]:
        kills = len(profile.on_every_rank + profile.on_the_leader) + KILLS_OF_A_TURN
        return {
            NAMED: lambda own, number: run_campaign(own, kills, number, nproc, profile, more),
            RANDOM: lambda own, number: run_at_random(
                own, KILLS_OF_A_TURN, profile.random_steps // 2, number, nproc, profile, more
            ),
        }

    profiles = {name: PROFILES[name] for name in names}
    packages = {name: profile.packages for name, profile in profiles.items()}
    cycle = Cycle({name: campaigns(profile) for name, profile in profiles.items()}, packages, print_line)
    problems = cycle.run(folder, hours, seed)
    for name, profile in profiles.items():
        kills = len(profile.on_every_rank + profile.on_the_leader) + KILLS_OF_A_TURN
        hit = {window for number in cycle.covered(name, NAMED) for window in profile.windows_of(kills, number)}
        print_line(
            f"{name}: {len(hit)} of {len(profile.windows)} windows hit, "
            f"{KILLS_OF_A_TURN * len(cycle.covered(name, RANDOM))} kills at random instants"
        )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=25, help="to hit all windows: 12 plus the profile's own")
    parser.add_argument("--random", action="store_true", help="kill any process, at random instants, in four ways")
    parser.add_argument("--hours", type=float, help="run all profiles in turn, with both kinds of kills, for H hours")
    parser.add_argument("--launcher", choices=("local", "ray"), default="local", help="launcher of the killed run")
    parser.add_argument("--steps", type=int, help="with --random: steps of each run (default: from the profile)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nproc", type=int, default=1, help="ranks")
    parser.add_argument("--profile", choices=PROFILES, help="kind of run (default: grpo; with --hours: all)")
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    parser.add_argument("overrides", nargs="*", help="settings for both runs, as for rlhf.train")
    arguments = parser.parse_args()
    profile = PROFILES[arguments.profile or "grpo"]
    if arguments.launcher == "ray":
        if arguments.random or arguments.hours is not None or OF_SERVERS.keys() & set(profile.windows):
            parser.error("--launcher ray: use it without --random and --hours, and with a profile without servers")
        if arguments.nproc != RAY_NODES:
            parser.error(f"--launcher ray: its {RAY_NODES} nodes have one rank each; use --nproc {RAY_NODES}")
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="rlhf-campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder, of_both = folder.absolute(), (arguments.seed, arguments.nproc, profile, arguments.overrides)
    if arguments.hours is not None:
        names = [arguments.profile] if arguments.profile else list(PROFILES)
        problems = take_turns(folder, arguments.hours, arguments.seed, arguments.nproc, names, arguments.overrides)
    elif arguments.random:
        steps = arguments.steps or profile.random_steps
        problems = run_at_random(folder, arguments.kills, steps, *of_both)
    else:
        with started(arguments.launcher, folder) as launcher:
            problems = run_campaign(folder, arguments.kills, *of_both, launcher)
    for problem in problems:
        sys.stdout.write(f"FAILED: {problem}\n")
    if not problems:
        sys.stdout.write("Every killed run equals the undisturbed one bit for bit.\n")
        if arguments.keep is None:
            shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
