"""Plays a task of the package `verifiers` as the program of an episode: `env=verifiers env.kwargs.id=TASKSET`.

A row has a column `task`: the number of a task in the taskset. The environment of verifiers runs in this program and
calls the policy through the episode's endpoint, so the trainer journals its requests and replays the program after a
crash. The environment must run as a program: verifiers cannot be called turn by turn, and its own server would hide
the episode's turns from the journal.
"""

import asyncio
import json
import os
import sys
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf.environments.adapters import need_package
from rlhf.environments.class_arguments import KWARGS
from rlhf.errors import UserError, did_you_mean, nearest
from rlhf.storage.files import write_small

NULL = "null"
"""Id of the harness in verifiers that only chats and calls the task's tools."""
_tasks: list[Any] = []
"""A finite taskset's tasks, or the first of an endless one. The host reads them once, before it forks programs."""


def preflight(id: str = "", config: dict[str, Any] | None = None, **other: object) -> None:
    """Import the taskset and read its tasks. Raise UserError for a mistake in `env.kwargs`.

    Args:
        id: name of the taskset.
        config: settings of the environment, such as {taskset: {split: train}, agent: {max_turns: 4}}.
    """
    for name in other:
        near = did_you_mean(nearest(name, ("id", "config")))
        raise UserError(f"{KWARGS}.{name}: env=verifiers has the arguments id and config.{near} Correct or remove it.")
    if not id:
        raise UserError(f"{KWARGS}: env=verifiers needs the name of a taskset. Set {KWARGS}.id=TASKSET.")
    need_package("env=verifiers", "verifiers", "verifiers")
    taskset = _environment(id, config or {}).taskset
    try:
        _tasks[:] = taskset if taskset.bounded else islice(taskset, 1)
    # A taskset may raise any error while it reads its data.
    except Exception as error:
        raise UserError(f"{KWARGS}.id={id}: its tasks cannot be read: {_line(error)}. Correct {KWARGS}.") from error
    if not _tasks:
        raise UserError(f"{KWARGS}.id={id}: the taskset has no task with {KWARGS}.config. Correct it.")


def _environment(id: str, config: dict[str, Any]) -> Any:
    """Return the environment of the taskset, whose agent runs in this program. Raise UserError for a mistake."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    try:
        kind = vf.env_config_type(id, config.get("id", ""))
        roles = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
        own = {name: config.get(name, {}) for name in roles}
        defaults = {"runtime": {"type": "subprocess"}, "harness": {"id": NULL}}
        taskset = {**config.get("taskset", {}), "id": id}
        made = vf.load_environment(
            kind.model_validate({**config, **{name: defaults | own[name] for name in roles}, "taskset": taskset})
        )
    except ModuleNotFoundError as error:
        raise UserError(f"{KWARGS}.id={id}: {_line(error)}. Correct the name, or install the taskset.") from error
    # Plugins may raise any error for wrong settings; pydantic's is a ValueError.
    except Exception as error:
        raise UserError(f"{KWARGS}: {_line(error)}. Correct {KWARGS}.") from error
    ours = [name for name, agent in agent_config_fields(made.config).items() if agent.client is None]
    if len(ours) != 1:
        raise UserError(
            f"{KWARGS}.id={id}: the environment has the agents {', '.join(ours)}, and an episode is one conversation. "
            f"Set {KWARGS}.config.AGENT.client for all agents but one."
        )
    return made


def _line(error: Exception) -> str:
    """Return the error as one line, without the settings' values, which may be secret."""
    if hasattr(error, "errors"):  # pydantic's ValidationError
        found = error.errors(include_input=False, include_url=False)
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
    return (" ".join(str(error).split()) or type(error).__name__)[:400].rstrip(".")


def _play_in_this_process() -> None:
    """Run the null harness in this process: verifiers would install it with uv and start a Python for each turn."""
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes import ProgramResult, subprocess

    runtime, code = subprocess.SubprocessRuntime, compile(CHAT_PROGRAM_SOURCE, "<null harness>", "exec")
    install, start = runtime.prepare_uv_script, runtime.run_program

    async def prepare(self: Any, script: str, *arguments: Any, **more: Any) -> list[str]:
        return [NULL] if script == CHAT_PROGRAM_SOURCE else await install(self, script, *arguments, **more)

    async def run(self: Any, argv: list[str], env: dict[str, str]) -> Any:
        if argv[0] != NULL:
            return await start(self, argv, env)
        os.chdir(self.workdir)
        sys.argv, names = argv, {"__name__": "null_harness"}
        exec(code, names)
        try:
            await names["main"]()  # type: ignore[operator]
        except SystemExit as end:
            return ProgramResult(int(end.code or 0), "", "")
        except Exception:
            return ProgramResult(1, "", traceback.format_exc())
        return ProgramResult(0, "", "")

    runtime.prepare_uv_script, runtime.run_program = prepare, run
    # At its import, verifiers chose a folder in another home folder.
    subprocess.CACHE_DIR = Path.home() / ".cache" / "verifiers"
    runtime.scripts_dir = str(subprocess.CACHE_DIR / "runtimes" / "scripts")


async def _play(environment: Any, task: Any) -> float:
    """Play one episode and return the reward of the agent that the policy plays. Exit if the episode has failed."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.configs.client import EvalClientConfig

    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(model="policy", client=client)
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    others = {name for name, agent in agent_config_fields(environment.config).items() if agent.client is not None}
    traces = [trace for trace in episode.traces if trace.agent.name not in others]
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors or not traces:
        sys.exit("\n".join(f"{error.type}: {error.message}" for error in errors) or "the episode has no trace")
    return float(sum(trace.reward for trace in traces))


def main() -> None:
    """Play the task of RLHF_ROW and write its reward."""
    row, kwargs = json.loads(os.environ["RLHF_ROW"]), json.loads(os.environ["RLHF_KWARGS"])
    number = row.get("task")
    if not isinstance(number, int) or number < 0:
        sys.exit(f"the row's column task is {number!r}. Set it to the number of a task of {kwargs['id']}, from 0.")
    environment = _environment(kwargs["id"], kwargs.get("config") or {})
    if environment.taskset.bounded:
        task = _tasks[number] if number < len(_tasks) else None
    else:
        task = next(islice(environment.taskset, number, None))
    if task is None:
        sys.exit(f"the row's column task is {number}, but {kwargs['id']} has {len(_tasks)} tasks. Correct the row.")
    _play_in_this_process()
    reward = asyncio.run(_play(environment, task))
    write_small(Path(os.environ["RLHF_REWARD_FILE"]), str(reward).encode())


if __name__ == "__main__":
    # Run the module that the host imported: it has the tasks.
    from rlhf.environments.adapters import verifiers_agent

    verifiers_agent.main()
