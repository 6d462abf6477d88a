"""An agent for tests: `python chat_agent.py BEHAVIOR`. It needs the standard library alone."""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROW = json.loads(os.environ["RLHF_ROW"])
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Compute.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def ask(
    messages: list[dict],
    key: str = os.environ["OPENAI_API_KEY"],
    retries: int = 0,
    timeout: float | None = None,
    **more: object,
) -> dict:
    """`retries`: how often OpenAI's client would say that it has sent the request before."""
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    headers["x-stainless-retry-count"] = str(retries)
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)["choices"][0]["message"]


def reward(number: object) -> None:
    Path(os.environ["RLHF_REWARD_FILE"]).write_text(str(number))


def sums() -> None:
    """Do as `logged_calls.Sums`."""
    messages, found, draws = [dict(message) for message in ROW["messages"]], 0.0, random.Random(ROW["seed"])
    for turn in range(3):
        messages.append(ask(messages))
        found += messages[-1]["content"].strip() == ROW["ground_truth"]
        if turn < 2:
            messages.append({"role": "user", "content": f"again {draws.randrange(10)}"})
    reward(found + draws.random() / 8)


def draws() -> None:
    """Use a generator without a seed, and the order of a set."""
    text = f"{random.randrange(1000)} {list({'a', 'b', 'c', 'd', 'e'})}"
    ask([*ROW["messages"], {"role": "user", "content": text}])


def paths() -> None:
    """Send the path of the program's folder to the policy, as coding agents do."""
    ask([*ROW["messages"], {"role": "user", "content": f"{Path.cwd()} {tempfile.gettempdir()}"}])


def late() -> None:
    """Write the reward in a thread, and in an executor, after the script's end."""
    ask(ROW["messages"])
    threading.Thread(target=lambda: (time.sleep(0.5), reward(0.5))).start()
    ThreadPoolExecutor().submit(lambda: (time.sleep(1), reward(1)))


def again() -> None:
    """Send the same request twice, as OpenAI's client does that did not wait for the answer."""
    first = ask(ROW["messages"])
    assert ask(ROW["messages"], retries=1) == first
    reward(1)


def impatient() -> None:
    """Close the connection before the answer, twice, and send the same request again."""
    for _ in range(2):
        try:
            ask(ROW["messages"], timeout=0.001)
        except TimeoutError:
            continue
        raise AssertionError("an answer within a millisecond")
    ask(ROW["messages"])
    reward(1)


def best() -> None:
    """Ask the same question four times."""
    answers = [ask(ROW["messages"])["content"] for _ in range(4)]
    reward(len(set(answers)))


def same_at_once() -> None:
    """Ask the same question twice at the same time."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ask, [ROW["messages"]] * 2))


def steal() -> None:
    """Write into other folders, read other variables, and kill everything."""
    ask(ROW["messages"])
    reward(1)
    for folder in Path.cwd().parent.glob("episode-*"):
        if folder != Path.cwd():
            with suppress(OSError):
                (folder / "reward").write_text("666")
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            foreign = b"OPENAI_API_KEY=" in variables.read_bytes()
            if foreign and variables.parent.name != str(os.getpid()):
                reward(333)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) != os.getpid():
                os.kill(int(process.name), 9)
    time.sleep(1)


def pipe() -> None:
    ask(ROW["messages"])
    os.mkfifo(os.environ["RLHF_REWARD_FILE"])


def nested(levels: int = 480) -> None:
    tool = json.loads(json.dumps(CALC))
    inner = tool["function"]["parameters"]["properties"]["expression"]
    for _ in range(levels):
        inner["items"] = inner = {}
    try:
        ask(ROW["messages"], tools=[tool])
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code} {error.read().decode()}")


def nested_more() -> None:
    nested(900)


def nested_call() -> None:
    """Send the result of a call whose arguments are nested: they are a text in the request."""
    call = {"id": "123456789", "type": "function", "function": {"name": "calc"}}
    call["function"]["arguments"] = '{"a": ' + "[" * 480 + "]" * 480 + "}"
    messages = [*ROW["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        ask([*messages, {"role": "tool", "tool_call_id": "123456789", "content": "1"}], tools=[CALC])
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code} {error.read().decode()}")


def silent() -> None:
    sys.stderr.write("nothing to do\n")


def crash() -> None:
    ask(ROW["messages"])
    raise ValueError("the agent burnt")


def compact() -> None:
    """Replace the history by a summary, ask a new question with tools, and go back to the first history."""
    user = lambda text: {"role": "user", "content": text}  # noqa: E731
    first = [*ROW["messages"]]
    first += [ask(first), user("Again.")]
    first.append(ask(first))
    summary = [{"role": "system", "content": "Sum."}, user(f"It was {first[1]['content'].strip()[:8]}. Go on.")]
    summary.append(ask(summary))
    summary.append(ask([*summary, user("More.")]))
    summary[-1:-1] = [user("More.")]
    ask([user("A new question.")], tools=[CALC])
    last = ask([*first, user("The last one.")])
    reward(len(last["content"]))


def compacts() -> None:
    """Rewrite the history before each turn, without end."""
    for number in range(100):
        ask([*ROW["messages"], {"role": "user", "content": f"note {number}"}])


def long() -> None:
    """Rewrite the history to one that is longer than a prompt may be, and then to one that is too long for a row."""
    ask(ROW["messages"])
    reward(1)
    for words in (45, 100):
        ask([*ROW["messages"], {"role": "user", "content": "9 " * words}])
    reward(2)


def twice() -> None:
    """Send two requests at the same time."""
    two = [ROW["messages"], [{"role": "user", "content": "another"}]]
    threads = [threading.Thread(target=ask, args=(messages,)) for messages in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def flood() -> None:
    messages = [dict(message) for message in ROW["messages"]]
    while True:
        messages += [ask(messages), {"role": "user", "content": "more"}]


def hang() -> None:
    ask(ROW["messages"])
    time.sleep(1000)


def stay() -> None:
    """Leave a process behind."""
    program = [sys.executable, "-c", "import time; time.sleep(1000)  # left-by-an-agent"]
    subprocess.Popen(program)
    subprocess.Popen(program, start_new_session=True)
    ask(ROW["messages"])
    reward(1)


def no_number() -> None:
    ask(ROW["messages"])
    reward("good")


def no_reward() -> None:
    ask(ROW["messages"])


def unsupported() -> None:
    try:
        ask(ROW["messages"], n=2)
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())


def escape() -> None:
    """Say what the program reaches."""
    reached = []
    try:
        socket.create_connection(("127.0.0.1", int(ROW["port"])), 2).close()
        reached.append("the machine")
    except OSError:
        pass
    try:
        socket.socket(socket.AF_UNIX)
        reached.append("a socket file")
    except OSError:
        pass
    try:
        ask(ROW["messages"], key="guess")
        reached.append("another's endpoint")
    except urllib.error.HTTPError:
        pass
    ask([{"role": "user", "content": ", ".join(reached) or "nothing"}])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
