"""Runs as one confined process per rank that imports the environment classes once, and forks processes for them.

`python -m rlhf.environments.host PARENT_PID CONFINEMENT CHANNEL`, where CONFINEMENT is a `Confinement` as JSON and
CHANNEL the number of an inherited SEQPACKET socket. The first message to the host names the classes, or the program of
`env.command`. The host answers with their definitions or an error. Each later message asks the host to fork or to kill
a process. A request to fork comes with a socket, on which the new process receives one socket per environment.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from socket import recv_fds, socket
from typing import Any

from rlhf.config.agent_command import label_of
from rlhf.config.user_functions import ENV_CLASSES, load_function
from rlhf.environments.adapters import preflight_program
from rlhf.environments.agent_program import ServedAgent
from rlhf.environments.agent_start import ProgramStart, import_for, script_of
from rlhf.environments.class_arguments import with_arguments
from rlhf.environments.definition import Definition, define
from rlhf.environments.serving import Served, Server, serve, written_files
from rlhf.errors import UserError
from rlhf.reward.confinement import Confinement, confine
from rlhf.reward.kernel import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from rlhf.reward.namespaces import NoLoopback
from rlhf.storage.files import remove_dir

NewServed = Callable[[dict[str, Any]], Server]
"""Returns a new environment for a request to fork."""
MESSAGE_BYTES = 1 << 17
_MOST_SOCKETS = 8
_LONGEST = 20_000
_NO_NAMESPACE = (
    "env.command: this machine does not allow the network namespace in which programs reach only the trainer ({}). Set "
    "env.network=true to let them use the network of this machine."
)


def main(parent_pid: int, confinement: Confinement, number: int) -> None:
    _die_with(parent_pid)
    try:
        confined = confine(confinement)
    except NoLoopback as error:
        with socket(fileno=number) as channel:
            channel.recv(MESSAGE_BYTES)
            channel.send(json.dumps({"error": _NO_NAMESPACE.format(error), "user": True}).encode())
        return
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # `_kill` finds what the killed process has started
    with socket(fileno=number) as channel:
        if not (first := channel.recv(MESSAGE_BYTES)):
            return
        try:
            settings = json.loads(first)
            specs: list[str] = settings["classes"]
            classes: list[Any] = [load_function(ENV_CLASSES, spec) for spec in specs]
            definitions = [define(spec, made) for spec, made in zip(specs, classes, strict=True)]
            makers = with_arguments(classes, settings["kwargs"], settings["process"]) if classes else []
            if command := settings["command"]:
                definitions = [Definition(label_of(command), [], None, True, is_agent=True)]
                if (script := script_of(command)) is not None:
                    import_for(script)
                    preflight_program(script, settings["kwargs"])
                os.environ["RLHF_KWARGS"] = json.dumps(settings["kwargs"])
                program = ProgramStart(command, confinement.writable, confinement.network)
        # Also catch SystemExit, which a script without a __main__ guard may raise.
        except BaseException as error:
            reply = {"error": str(error)[-_LONGEST:], "user": isinstance(error, UserError)}
            channel.send(json.dumps(reply | dataclasses.asdict(confined)).encode())
            return
        found = [dataclasses.asdict(definition) for definition in definitions]
        answer = json.dumps({"definitions": found} | dataclasses.asdict(confined)).encode()
        if len(answer) > MESSAGE_BYTES:
            why = f"its tools have schemas of {len(answer)} bytes, and at most {MESSAGE_BYTES} are possible"
            channel.send(json.dumps({"error": why, "user": False} | dataclasses.asdict(confined)).encode())
            return
        channel.send(answer)
        if command:
            _obey(channel, lambda request: ServedAgent(program, settings["timeout_s"], _folder_of(request)))
        else:
            files = written_files()
            _obey(channel, lambda request: Served(makers, definitions, alone=request["alone"], imported_files=files))


def _folder_of(request: dict[str, Any]) -> Path:
    return Path(tempfile.gettempdir()) / f"episode-{request['name']}"


def _obey(channel: socket, new: NewServed) -> None:
    """Fork and kill processes as the trainer asks, until the trainer closes the channel."""
    processes: dict[int, tuple[int, dict[str, Any]]] = {}

    def kill(number: int) -> dict[str, Any]:
        process, request = processes.pop(number)
        _kill(process, [pid for pid, _ in processes.values()])
        return request

    def clean(request: dict[str, Any]) -> None:
        if request["name"]:
            remove_dir(_folder_of(request), ignore_errors=True)

    while True:
        message, sockets, _, _ = recv_fds(channel, MESSAGE_BYTES, _MOST_SOCKETS)
        if not message:
            return
        request = json.loads(message)
        for number, (process, _) in list(processes.items()):
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                clean(kill(number))  # the processes that it started may still run
        if "fork" in request:
            if not (process := os.fork()):
                _serve_all(channel, socket(fileno=sockets[0]), partial(new, request))
            processes[request["fork"]] = process, request
            os.close(sockets[0])
        else:
            numbers = list(processes) if request["kill"] is None else {request["kill"]} & processes.keys()
            killed = [kill(number) for number in numbers]
            channel.send(json.dumps({"killed": request["kill"]}).encode())
            for each in killed:  # after the answer, because a program may have left very many files
                clean(each)


def _kill(process: int, others: Collection[int]) -> None:
    """Kill a process and everything that it started, also in other sessions. `others`: this process' other children."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # just after the fork, the process has no group of its own yet
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    while strays := [child for child in _children() if child not in others]:
        for child in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    """Return the process ids of this process' children; empty if /proc shows another process namespace."""
    try:
        if str(Path("/proc/self").readlink()) != str(os.getpid()):
            return []
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _serve_all(channel: socket, control: socket, new: Callable[[], Server]) -> None:
    """Serve each socket that arrives on `control` in a thread, until the trainer closes `control`. Never return."""
    try:
        os.setsid()  # a kill of the group then reaches all processes that users' code starts
        if sys.platform == "linux":
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        channel.close()
        threads = []
        while True:
            message, sockets, _, _ = recv_fds(control, MESSAGE_BYTES, _MOST_SOCKETS)
            if not message:
                break
            for number in sockets:
                threads.append(threading.Thread(target=serve, args=(socket(fileno=number), new()), daemon=True))
                threads[-1].start()
            threads = [thread for thread in threads if thread.is_alive()]
        for thread in threads:
            thread.join()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone")


if __name__ == "__main__":
    main(int(sys.argv[1]), Confinement(**json.loads(sys.argv[2])), int(sys.argv[3]))
