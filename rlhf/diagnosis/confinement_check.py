"""Checks which protections this machine supports for the processes that run rewards and environments.

`python -m rlhf.diagnosis.confinement_check CONFINEMENT` confines itself, and writes the result to stdout as JSON.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf.config.schema.env import EnvConfig
from rlhf.config.schema.reward import REWARD_MODEL, RewardConfig
from rlhf.diagnosis.check_result import Outcome, error, ok, warning
from rlhf.ranks.parent import PARENT_PID, die_with_parent
from rlhf.reward.confinement import Confinement, confine
from rlhf.reward.namespaces import NoLoopback
from rlhf.storage.files import remove_dir

IN_THE_RANKS = ("exact_match", REWARD_MODEL)
"""Rewards that need no confined process."""
TIMEOUT_S = 20.0
PAGE = "docs/design/reward-isolation.md"


def confinements(reward: RewardConfig, env: EnvConfig) -> list[Confinement]:
    """Return the rights of each kind of confined process that a run starts."""
    found = []
    if any(name not in IN_THE_RANKS for name in reward.functions):
        found.append(Confinement(reward.memory_gb, reward.network, []))
    if env.used:
        found.append(Confinement(env.memory_gb, env.network, [], loopback=env.command is not None))
    return found


def check_confinement(needed: Sequence[Confinement]) -> Iterator[Outcome]:
    """Confine a process of each kind, and report the protections that are missing."""
    if not needed:
        yield ok("no process of the run needs confinement")
        return
    missing: list[str] = []
    for confinement in needed:
        answer = _try(confinement)
        if "problem" in answer:
            yield error(f"processes cannot be confined: {answer['problem']}. {_remedy()}")
            return
        missing += answer["missing"]
    if missing:
        yield warning(f"processes are not confined fully. Missing: {'; '.join(dict.fromkeys(missing))}. {_remedy()}")
    else:
        yield ok("processes of rewards and environments are confined fully")


def _remedy() -> str:
    return f"Allow user namespaces and Landlock on the host (containers: another seccomp profile); {PAGE} has details."


def _try(confinement: Confinement) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "rlhf.diagnosis.confinement_check"]
    try:
        done = subprocess.run(
            [*command, json.dumps(dataclasses.asdict(confinement))],
            env=os.environ | {PARENT_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"not ready after {TIMEOUT_S:g} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"problem": f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"}
    if folder := answer.get("folder"):
        remove_dir(Path(folder), ignore_errors=True)
    return answer


def main(confinement: Confinement) -> None:
    """Confine this process, and write the result to stdout."""
    die_with_parent()
    try:
        answer = dataclasses.asdict(confine(confinement))
    except (OSError, NoLoopback) as problem:
        answer = {"problem": str(problem)}
    os.write(1, json.dumps(answer).encode())


if __name__ == "__main__":
    main(Confinement(**json.loads(sys.argv[1])))
