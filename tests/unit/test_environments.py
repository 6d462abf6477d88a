"""Environment classes: what is checked before a run, their saved states, and sessions that leave nothing behind."""

import contextlib
import itertools
import os
import random
import re
import time
from collections import Counter, OrderedDict, defaultdict
from datetime import date
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf.api import check_inputs
from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.agent_command import files_of, split_command
from rlhf.config.library import Library
from rlhf.config.rules.env_rules import idle_env
from rlhf.config.rules.validate import validate
from rlhf.config.schema.env import EnvConfig
from rlhf.config.user_functions import hash_of_files
from rlhf.data import Prompt
from rlhf.data.turns.tool_calls import Turn
from rlhf.environments import free_text
from rlhf.environments.class_checks import check_environments, check_row
from rlhf.environments.definition import Definition, define
from rlhf.environments.host_handle import Host
from rlhf.environments.saved_state import MOST_BYTES, restore, saved
from rlhf.environments.sessions import EnvironmentFailed, EnvironmentPool, Session
from rlhf.errors import UserError
from rlhf.experience.episode import EnvironmentClass, Episode, Limits, Stage
from rlhf.rollout import Sample, SamplingParams
from rlhf.rollout.sample import ROW
from tests.support.refusals import says, user_error

TOOL = '    def look(self, at: int) -> str:\n        """Look.\n\n        Args:\n            at: where.\n        """\n'
WRONG = {
    "class E:\n    def begin(self): pass\n" + TOOL: ("E", "reset"),
    "class E:\n    def reset(self, **row): pass\n    def look(self, at):\n        'Look.'\n": ("look", "at", "type"),
    "class E:\n    def reset(self, **row): pass\n    def look(self, at: int): pass\n": ("look", "docstring"),
    "class E:\n    def reset(self, at, /): pass\n" + TOOL: ("reset takes at by position only", "Remove the /"),
    "def E(): pass\n": ("E", "class"),
    "class F: pass\n": ("E",),
}


class CountingChat:
    """A chat of one token per character that counts what it tokenizes."""

    def __init__(self):
        self.characters = 0

    def harmless(self, text):
        return text

    def prompt(self, messages):
        return self.observation([], messages)

    def observation(self, sampled, messages):
        tokens = [1] * sum(len(message["content"]) for message in messages)
        self.characters += len(tokens)
        return tokens

    def parse(self, tokens):
        return Turn("", "", (), ended=True)

    def text(self, tokens):
        return f"{len(tokens)} tokens"


def episode(chat: CountingChat) -> Episode:
    kind = EnvironmentClass(0, Definition("Talk", [], "step", False), lambda tools: chat)
    prompt = Prompt(0, [{"role": "user", "content": "Go."}], [], "", None, {})
    limits = Limits(turns=4, rows=1, invalid_calls=0, retries=0, prompt_tokens=16, vocabulary=32)
    return Episode(0, 0, prompt, SamplingParams(max_tokens=16), kind, limits, {}, lambda name: None)


def test_texts_of_megabytes_are_not_tokenized():
    chat = CountingChat()
    with pytest.raises(UserError, match=r"Talk .*10000003 characters(?s:.)*data.max_prompt_length=16"):
        episode(chat).take_replies([{"value": "x" * 10_000_000}])
    played = episode(chat)
    played.take_replies([{"value": None}])
    played.take_turn(Sample.of(0, 0, [5, 6], [-1.0, -1.0], "stop", 0))
    played.take_replies([{"value": ["x" * 10_000_000, 1.0]}])
    assert played.operation == "reward"
    assert chat.characters == len("Go.")
    played.take_replies([{"value": 0.0}])
    assert played.finished(0).finish_reason == "length"


class AlternatingChat(CountingChat):
    """Rejects two messages of one role in a row, as Gemma's template does."""

    def prompt(self, messages):
        if any(one["role"] == other["role"] for one, other in itertools.pairwise(messages)):
            raise UserError("roles must alternate")
        return super().prompt(messages)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def agent(turns: int = 9, rows: int = 3, retries: int = 0) -> tuple[Episode, list, list]:
    """Return an episode of an agent after its first turn, the tools that chats were built for, and dropped sessions."""
    tools, dropped = [], []
    definition = Definition("agent", [], None, True, is_agent=True)
    kind = EnvironmentClass(0, definition, lambda given: (tools.append(given), AlternatingChat())[1])
    limits = Limits(turns=turns, rows=rows, invalid_calls=0, retries=retries, prompt_tokens=8, vocabulary=32)
    prompt = Prompt(0, [user("Go.")], [], "", None, {})

    def session(name: str) -> SimpleNamespace:
        return SimpleNamespace(drop=lambda: dropped.append(name))

    played = Episode(5, 1, prompt, SamplingParams(max_tokens=6), kind, limits, {}, session)
    played.take_replies([{"value": {"messages": [user("Go.")], "tools": []}}])
    turn(played)
    return played, tools, dropped


def turn(played: Episode) -> None:
    request = played.request()
    played.take_turn(Sample.of(5, request.sample, [7, 8], [-1.0, -2.0], "stop", 0))


def fork(played: Episode, *messages: dict[str, str], **more: object) -> None:
    played.take_replies([{"value": {"messages": list(messages), "tools": [], "kept": 0} | more}])


def test_each_row_has_room_for_a_response():
    played, tools, _ = agent()
    assert played.request().context == [1, 1, 1, 7, 8]
    fork(played, user("a summary"), tools=["look"])  # nine tokens: eight of the prompt, and an observation
    assert tools[-1] == ["look"]
    assert (played.request().sample, played.request().start, len(played.request().token_ids)) == (1 + ROW, 1, 8)
    turn(played)
    assert played.calls[0]["usage"] == {"prompt_tokens": 9, "completion_tokens": 2}
    played.take_replies([{"value": [user("x")]}])
    turn(played)
    assert played.calls[0]["usage"] == {"prompt_tokens": 12, "completion_tokens": 2}
    fork(played, user("y"))
    assert (played.request().sample, played.request().response) == (1 + 2 * ROW, None)
    turn(played)
    fork(played, user("z"))
    assert (played.operation, played.lacks_row, played.rows) == ("reward", True, 3)
    played.take_replies([{"value": 2.0}])
    sample = played.finished(0)
    assert sample.token_ids.tolist() == [7, 8, *[1] * 9, 7, 8, 1, 7, 8, 1, 7, 8]
    assert sample.forks == ((2, 8), (16, 1))
    assert sample.mask().tolist() == (sample.token_ids > 1).tolist()
    assert [len(row.response) for row in sample.rows([1, 1, 1])] == [2, 6, 2]
    roles = [message["role"] for message in played.conversation]
    assert roles == ["assistant", "user", "assistant", "user", "assistant", "user", "assistant", "user"]


def test_a_row_of_token_ids_is_not_rendered():
    played, tools, _ = agent()
    played.take_replies([{"value": {"token_ids": [3, 4], "kept": 0}}])
    assert (played.request().context, played.request().start) == ([3, 4], 0)
    turn(played)
    usage = {"prompt_tokens": 2, "completion_tokens": 2}
    answer = {"op": "answer", "token_ids": [7, 8], "log_probs": [-1.0, -2.0], "versions": ((0, 2),), "usage": usage}
    assert played.calls == [answer]
    played.take_replies([{"value": [5]}])
    assert played.request().context == [3, 4, 7, 8, 5]
    turn(played)
    fork(played, user("y"), tools=["look"])
    assert tools[-1] == ["look"]
    turn(played)
    assert "message" in played.calls[0]
    played.take_replies([{"value": None}])
    played.take_replies([{"value": 0.0}])
    sample = played.finished(0)
    assert sample.token_ids.tolist() == [7, 8, 3, 4, 7, 8, 5, 7, 8, 1, 7, 8]
    assert sample.mask().tolist() == (sample.token_ids > 6).tolist()
    assert sample.forks == ((2, 2), (9, 1))
    texts = [message["content"] for message in played.conversation if message["role"] == "user"]
    assert texts == ["2 tokens", "1 tokens", "y"]


def test_a_long_row_of_token_ids_ends_the_episode():
    played, _, _ = agent()
    played.take_replies([{"value": {"token_ids": [3] * 14, "kept": 0}}])
    assert (played.operation, played.lacks_row) == ("reward", False)
    played, _, _ = agent()
    played.take_replies([{"value": {"token_ids": [3] * 13, "kept": 0}}])
    assert (played.request().tokens_left, played.request().start) == (1, 5)


def test_a_history_without_room_ends_the_episode():
    played, _, _ = agent()
    fork(played, user("x" * 14))
    assert (played.operation, played.lacks_row, played.rows) == ("reward", False, 1)
    played, _, _ = agent()
    fork(played, user("x" * 13))
    assert played.request().tokens_left == 1


def test_the_limit_of_turns_comes_before_the_limit_of_rows():
    played, _, _ = agent(turns=1, rows=1)
    fork(played, user("x"))
    assert (played.operation, played.lacks_row) == ("reward", False)


def test_a_rewritten_history_that_the_template_rejects_fails_the_episode():
    """It depends on what the policy wrote, so it must not end a run at any step."""
    played, _, dropped = agent(retries=1)
    fork(played, user("x"), user("y"))
    assert (played.attempt, played.operation, dropped) == (1, "start", ["5-1-0"])
    played.take_replies([{"value": {"messages": [user("Go.")], "tools": []}}])
    turn(played)
    fork(played, user("x"), user("y"))
    assert played.phase is Stage.FAILED
    says(played.failures[-1], "rewrote its history", "roles must alternate")


def test_a_spec_without_a_class_asks_for_one():
    with pytest.raises(UserError, match=r"env.classes=shop.py .*the file, a colon and the class"):
        check_environments(EnvConfig(classes=["shop.py"]))


AGENT = ["recipes=env_guess", "data=files"]


def test_an_entry_of_a_group_and_its_setting_may_be_given_together():
    config = compose_config([*AGENT, "data.train_files=rows.jsonl"], Library.find(None))
    assert config.data.train_files == "rows.jsonl"
    with pytest.raises(UserError, match="data=files: has no effect"):
        compose_config(AGENT, Library.find(None))


def test_an_entry_after_its_setting_is_a_mistake():
    """A new user trained with another reward than the end of the command named, without a message."""
    both = ["reward.functions=[rewards.py:mine]", "reward=exact_match"]
    with pytest.raises(UserError, match=r"reward=exact_match: has no effect, because reward\.functions=.*mine.*Remove"):
        compose_config(both, Library.find(None))
    assert compose_config(both[::-1], Library.find(None)).reward.functions == ["rewards.py:mine"]


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [("rollout.stop=[x]", "Set rollout.stop=[]."), ("rollout.async_steps=2", "Set rollout.async_steps=0.")],
)
def test_a_setting_that_episodes_exclude_gets_one_message(setting, remedy):
    config = compose_config(["recipes=env_guess", setting], Library.find(None))
    with pytest.raises(UserError) as raised:
        validate(config, {})
    (line,) = str(raised.value).splitlines()
    assert line.startswith("rollout.")
    assert line.endswith(remedy)


@pytest.mark.parametrize(
    "settings", [["recipes=env_calculator", "reward.functions=[]"], ["recipes=env_guess", "env.reward_weight=0"]]
)
def test_a_run_without_any_reward_is_a_mistake(settings):
    """A user left one of the two settings out, and the run trained on reward 0 to its end."""
    config = compose_config(settings, Library.find(None))
    with pytest.raises(UserError) as raised:
        validate(config, {})
    says(raised.value, "env.reward_weight=0.0", "reward.functions=[]", "reward 0", "Set env.reward_weight=1")
    config.env.reward_weight = -1.0
    validate(config, {})


def test_a_wrong_template_is_named_before_the_model_is_loaded(tmp_path):
    (tmp_path / "chat.jinja").write_text("{% for")
    for name in ("none.jinja", "chat.jinja"):
        template = f"env.template={tmp_path / name}"
        with pytest.raises(UserError, match=re.escape(template)):
            check_inputs(compose_config(["recipes=env_guess", template], Library.find(None)))


def test_settings_without_an_environment_are_a_mistake():
    config = Config()
    assert list(idle_env(config, [("env.max_turns", 4)])) == [
        "env.max_turns=4: has no effect without an environment. Set env.classes=[FILE.py:CLASS] or "
        "env.command='python FILE.py', or remove it."
    ]
    for config.env.classes, config.env.command in ((["shop.py:Shop"], None), ([], "python agent.py")):
        assert list(idle_env(config, [("env.max_turns", 4)])) == []


def test_rows_of_a_class_are_a_mistake():
    config = compose_config(["recipes=env_guess", "env.max_rows=2"], Library.find(None))
    with pytest.raises(UserError, match=r"env\.max_rows=2: has effect only with env\.command"):
        validate(config, {})


def test_classes_and_a_program_exclude_each_other():
    config = compose_config(["recipes=env_guess", "env.command=echo x"], Library.find(None))
    with pytest.raises(UserError, match=r"env\.classes=.*env\.command=echo x is an environment, too"):
        validate(config, {})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python agnt.py", ("no file", "agent.py", "Correct the path")),
        ("nothere agent.py", ("no program nothere",)),
        ("'python", ("Correct the quotes",)),
        (" ", ("is empty", "python agent.py")),
        ("python broken.py", ("broken.py cannot be read as Python",)),
    ],
)
def test_a_wrong_command_is_named_before_anything_runs(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "broken.py").write_text("def")
    with pytest.raises(UserError, match=r"env\.command=") as raised:
        check_environments(EnvConfig(command=command))
    for word in words:
        assert word in str(raised.value)
    assert split_command("python agent.py --n 3")[1:] == [str(tmp_path / "agent.py"), "--n", "3"]


@pytest.mark.parametrize("words", ["--api-key sk-abcdefghijklmnopqrstuv", "API_TOKEN=abcdefghijkl"])
def test_a_secret_in_a_command_is_not_stored(words):
    config = compose_config(
        ["recipes=env_guess", "env=none", f"env.command='python agent.py {words}'"], Library.find(None)
    )
    with pytest.raises(UserError, match=r"env\.command: it contains a secret.*env\.pass_env") as raised:
        validate(config, {})
    assert words.split("=")[-1].split()[-1] not in str(raised.value)


def test_the_files_of_a_command_are_part_of_the_trajectory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("a = 1")
    before = hash_of_files(files_of("python agent.py"))
    (tmp_path / "agent.py").write_text("a = 2")
    assert hash_of_files(files_of("python agent.py")) != before


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_class_is_named_without_running_it(text, tmp_path):
    file = tmp_path / "e.py"
    file.write_text(text + "\nraise SystemExit\n")
    with pytest.raises(UserError) as raised:
        check_environments(EnvConfig(classes=[f"{file}:E"]))
    assert all(fact in str(raised.value) for fact in (f"env.classes={file}:E", *WRONG[text]))


def test_a_missing_file_and_an_unknown_environment_in_a_row_are_named(tmp_path):
    with pytest.raises(UserError, match="no file"):
        check_environments(EnvConfig(classes=[f"{tmp_path}/none.py:E"]))
    two = EnvConfig(classes=["a.py:Maze", "b.py:Shop"])
    check_row(two, {"environment": "Maze"}, "row 3")
    for record in ({"environment": "Mase"}, {}):
        with pytest.raises(UserError, match=r"row 3.*(?s:.)*Maze"):
            check_row(two, record, "row 3")


def test_every_public_method_is_a_tool_unless_text_is_read():
    class Toolbox:
        def reset(self, **row): ...
        def close(self): ...
        def _hidden(self): ...
        def step(self, text: str) -> str:
            """Step.

            Args:
                text: any.
            """
            return text

    class Talker:
        def reset(self, **row): ...

        @free_text
        def answer(self, text): ...

    assert [tool["function"]["name"] for tool in define("x", Toolbox).tools] == ["step"]
    assert (define("x", Talker).tools, define("x", Talker).step) == ([], "answer")


class Plain:
    pass


def test_plain_attributes_are_a_state_and_others_are_not():
    one, other = Plain(), Plain()
    values = {"a": 1, "b": [1.5, None, {"c": ("x", True)}], "r": random.Random(3)}
    vars(one).update(values)
    restore(other, saved(one))
    assert [one.r.random() for _ in range(3)] == [other.r.random() for _ in range(3)]
    assert (other.a, other.b) == (1, [1.5, None, {"c": ("x", True)}])
    shared: list[int] = []
    for attributes in ({"f": os.devnull.encode()}, {"x": shared, "y": shared}, {"d": {1: 2}}, {"s": {1}}):
        vars(one).clear()
        vars(one).update(attributes)
        assert saved(one) is None


def test_large_attributes_are_no_state_and_a_large_state_dict_is_named():
    class Owner:
        def state_dict(self) -> dict:
            return {"words": ["word"] * MOST_BYTES}

    one = Plain()
    one.words = ["word"] * (MOST_BYTES // 8)
    assert saved(one) is not None
    one.words = ["word"] * (MOST_BYTES // 4)
    assert saved(one) is None
    one.words = 10**5000
    assert saved(one) is None
    with pytest.raises(TypeError, match=r"state_dict returned \d+ bytes"):
        saved(Owner())


class Level(IntEnum):
    FIRST = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    "odd",
    [
        Counter(a=1),
        defaultdict(list, a=[]),
        OrderedDict(a=1),
        Level.FIRST,
        [{"deep": Counter()}],
        (1, 2),
        {1: 2},
        float("nan"),
    ],
    ids=repr,
)
def test_a_state_that_would_come_back_with_another_type_is_rejected(odd):
    """After a kill, a restored environment had a dict in place of its Counter, and raised KeyError."""

    class Owner:
        def state_dict(self) -> dict:
            return {"kept": odd}

    with pytest.raises(TypeError, match="state_dict must return"):
        saved(Owner())


def test_a_state_of_plain_values_comes_back_unchanged():
    class Owner:
        def state_dict(self) -> dict:
            return {
                "b": [1, 1.0, True, None, "x", {"c": {}}],
                "a": date(2020, 1, 2),
                "n": np.float64(0.1),
                "t": Text("t"),
            }

        def load_state_dict(self, state: dict) -> None:
            self.state = state

    owner = Owner()
    restore(owner, saved(owner))
    assert owner.state == owner.state_dict()
    assert type(owner.state["b"][2]) is bool


@pytest.mark.parametrize("levels", [200, 600])
def test_deep_attributes_are_no_state_and_a_deep_state_dict_is_named(levels):
    """The trainer's process would reach Python's limit of recursion."""
    inner: list = []
    for _ in range(levels):
        inner = [inner]

    class Owner:
        def state_dict(self) -> dict:
            return {"words": inner}

    one = Plain()
    one.words = inner
    assert saved(one) is None
    with pytest.raises(TypeError, match="more than 100 levels"):
        saved(Owner())


NOTES = """
import os, tempfile, uuid
FOLDER = PLACE
class Notes:
    def reset(self, **row):
        self.path = os.path.join(FOLDER or tempfile.gettempdir(), uuid.uuid4().hex)
    def add(self, note: str) -> str:
        '''Add a note.

        Args:
            note: a text.
        '''
        with open(self.path, "a") as file:
            file.write(note + "\\n")
        with open(self.path) as file:
            return f"{len(file.readlines())} notes"
    def think(self) -> str:
        '''Think.'''
        return "thought"
"""


@pytest.mark.parametrize("place", ["None", "tempfile.mkdtemp()", "'/dev/shm'"])
def test_an_environment_that_keeps_a_file_is_restored_by_its_calls(place, tmp_path):
    """Its attribute, the file's path, was restored without the file, and the resumed run had other rewards."""
    (tmp_path / "notes.py").write_text(NOTES.replace("PLACE", place))
    config = EnvConfig(classes=[f"{tmp_path / 'notes.py'}:Notes"])
    calls = [{"op": "reset", "row": {}}, {"op": "tool", "name": "think", "arguments": {}}]
    note = {"op": "tool", "name": "add", "arguments": {"note": "x"}}
    pool = EnvironmentPool(config).start()
    try:
        first = Session(pool, 0, 1)
        first.make(calls)
        assert first.state is not None
        replies = first.make([note])
        assert (first.state, replies[0]["value"]) == (None, "1 notes")
    finally:
        pool.close()
    pool = EnvironmentPool(config).start()  # the run was killed
    try:
        second = Session(pool, 0, 1)
        for call, reply in first.made:
            second.record([call], [reply], None)
        assert second.make([note])[0]["value"] == "2 notes"
    finally:
        pool.close()


ROOM = """
import os, tempfile
class Room:
    def reset(self, **row):
        self.folder = tempfile.mkdtemp()
    def add(self) -> str:
        '''Add a file.'''
        open(os.path.join(self.folder, "file"), "w").close()
        return "added"
"""


def test_an_environment_that_keeps_an_empty_folder_is_restored_by_its_calls(tmp_path):
    (tmp_path / "room.py").write_text(ROOM)
    config = EnvConfig(classes=[f"{tmp_path / 'room.py'}:Room"])
    pool = EnvironmentPool(config).start()
    try:
        session = Session(pool, 0, 1)
        session.make([{"op": "reset", "row": {}}])
        assert session.state is None
    finally:
        pool.close()


def _check_and_import(config: EnvConfig) -> None:
    check_environments(config)
    EnvironmentPool(config).start().close()


def test_half_a_state_is_rejected_before_the_start(tmp_path):
    """A class with state_dict alone could not be restored: each resumed episode failed."""
    (tmp_path / "half.py").write_text(ROOM.replace("    def add", "    def state_dict(self): return {}\n    def add"))
    for name in ("Room", "Inherits"):
        if name == "Inherits":
            with (tmp_path / "half.py").open("a") as file:
                file.write("class Inherits(Room):\n    pass\n")
        config = EnvConfig(classes=[f"{tmp_path / 'half.py'}:{name}"])
        with pytest.raises(UserError, match="has the method state_dict, but no method load_state_dict"):
            _check_and_import(config)


BAD = """
import os, random, time
class Bad:
    def reset(self, number, **row):
        self.random = random.Random(number)
        if self.random.random() < 0.1: raise RuntimeError("no")
        self.file = open(os.devnull)
    def act(self) -> str:
        '''Act.'''
        chance = self.random.random()
        if chance < 0.1: raise RuntimeError("no")
        if chance < 0.103: os._exit(1)
        if chance < 0.105: time.sleep(100)
        if chance < 0.2: raise ValueError("rejected")
        return "done"
"""


def children() -> set[str]:
    """Return the ids of this process' descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[stat.parent.name] = fields[1]
    found, new = set(), {str(os.getpid())}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def test_a_thousand_failing_episodes_leave_nothing(tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    before, files = children(), len(list(Path("/proc/self/fd").iterdir()))
    pool = EnvironmentPool(EnvConfig(classes=[f"{tmp_path / 'bad.py'}:Bad"], timeout_s=2.0)).start()
    folder = Path(pool._host._folder) if pool._host._folder else None

    def episode(number: int) -> str:
        session = Session(pool, 0, number)
        try:
            replies = session.make([{"op": "reset", "row": {"number": number}}])
            replies += session.make([{"op": "tool", "name": "act", "arguments": {}}] * 2)
            session.close()
        except EnvironmentFailed:
            session.drop()
            return "failed"
        return "rejected" if any("rejected" in reply for reply in replies) else "done"

    try:
        calls = [pool.submit(partial(episode, number)) for number in range(1000)]
        ends = {call.result() for call in calls}
    finally:
        pool.close()
    assert ends == {"failed", "rejected", "done"}
    deadline = time.monotonic() + 60
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not children() - before
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    assert folder is None or not folder.exists()


HOSTILE = """
import json, os, random, sys, time
class Hostile:
    def reset(self, **row):
        self.calls = 0
    def draw(self) -> str:
        '''Draw from the global generator.'''
        self.calls += 1
        return str(random.random())
    def half(self) -> str:
        '''Return half of a surrogate pair, as names of files may have.'''
        return os.fsdecode(bytes([255]))
    def forge(self, text: str) -> str:
        '''Write a reply before the real one.

        Args:
            text: the reply.
        '''
        frame = sys._getframe()
        while "channel" not in frame.f_locals:
            frame = frame.f_back
        number = frame.f_locals["request"]["number"]
        frame.f_locals["channel"].sendall(text.replace("NUMBER", number).encode() + bytes([10]))
        time.sleep(0.2)
        return ""
    def slow(self) -> str:
        '''Wait.'''
        time.sleep(1.2)
        return "done"
    def die(self) -> str:
        '''End the process.'''
        time.sleep(0.3)
        os._exit(1)
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A pool whose environments share one process."""
    file = tmp_path_factory.mktemp("hostile") / "hostile.py"
    file.write_text(HOSTILE)
    pool = EnvironmentPool(EnvConfig(classes=[f"{file}:Hostile"], timeout_s=20.0, num_workers=1)).start()
    yield pool
    pool.close()


def opened(pool: EnvironmentPool) -> Session:
    session = Session(pool, 0, 5)
    session.make([{"op": "reset", "row": {}}])
    return session


def call(session: Session, name: str, **arguments: str) -> dict:
    return session.make([{"op": "tool", "name": name, "arguments": arguments}])[0]


def test_a_process_of_its_own_keeps_its_global_generators(hostile, monkeypatch):
    """Promise 7: an environment that uses global generators has more state than its attributes."""
    monkeypatch.setattr(hostile.config, "process", "episode")
    undisturbed, resumed = opened(hostile), opened(hostile)
    expected = [call(undisturbed, "draw") for _ in range(3)]
    found = [call(resumed, "draw")]
    resumed.drop()
    assert found + [call(resumed, "draw") for _ in range(2)] == expected
    undisturbed.drop()
    resumed.drop()


FORGED = [
    "[" * 5000,
    "[1]",
    '{"number": "NUMBER"}',
    '{"number": "NUMBER", "value": 3, "state": null}',
    '{"number": "NUMBER", "value": "x", "state": 1}',
    '{"number": "NUMBER", "rejected": 1, "state": null}',
    '{"number": "NUMBER", "error": 1}',
    '{"number": "NUMBER", "value": "x", "state": {"own": ' + "[" * 300 + "]" * 300 + "}}",
]


@pytest.mark.parametrize("text", FORGED, ids=[text[:50] for text in FORGED])
def test_a_forged_reply_fails_its_episode_and_not_the_trainer(hostile, text):
    with pytest.raises(EnvironmentFailed):
        call(opened(hostile), "forge", text=text)


def test_half_of_a_surrogate_pair_is_a_question_mark(hostile):
    assert call(opened(hostile), "half") == {"value": "?"}


def test_a_dying_environment_fails_no_other_of_its_process(hostile):
    names = ["slow", "die", "die", "slow"]
    sessions = [opened(hostile) for _ in names]

    def end(session: Session, name: str) -> str:
        try:
            return call(session, name)["value"]
        except EnvironmentFailed:
            return "failed"

    calls = [hostile.submit(partial(end, session, name)) for session, name in zip(sessions, names, strict=True)]
    assert [made.result() for made in calls] == ["done", "failed", "failed", "done"]


def test_a_call_that_is_given_up_ends_at_once(tmp_path):
    """Otherwise a run that ends with an error would wait for its tools, or leave their programs to the next attempt."""
    file = tmp_path / "waits.py"
    file.write_text("import time\nclass Waits:\n    def reset(self, **row): time.sleep(600)\n" + TOOL)
    with contextlib.closing(EnvironmentPool(EnvConfig(classes=[f"{file}:Waits"], timeout_s=600)).start()) as pool:
        session = Session(pool, 0, 1)
        made = pool.submit(partial(session.make, [{"op": "reset", "row": {}}]))
        while session._channel is None:
            time.sleep(0.01)
        session.give_up()
        with pytest.raises(EnvironmentFailed, match="given up"):
            made.result(timeout=30)


@pytest.mark.parametrize(("words", "kwargs"), [(20, {"x": "y" * (1 << 17)}), (20000, {})])
def test_settings_and_tools_too_large_for_a_message_are_named(words, kwargs, tmp_path):
    file = tmp_path / "large.py"
    tool = "    def tool{}(self) -> str:\n        '{}'\n        return ''\n"
    tools = "".join(tool.format(i, "word " * words) for i in range(2))
    file.write_text(f"class Large:\n    def __init__(self, x=''): ...\n    def reset(self, **row): ...\n{tools}")
    host = Host(EnvConfig(classes=[f"{file}:Large"], kwargs=kwargs))
    with pytest.raises(UserError, match=r"(env\.kwargs|Large.*schemas).* at most 131072 are possible"):
        host.start()
    host.close()


@pytest.mark.slow
def test_a_host_that_starts_again_does_not_run_an_edited_file(tmp_path, caplog):
    file = tmp_path / "edited.py"
    file.write_text(HOSTILE)
    config = EnvConfig(classes=[f"{file}:Hostile"], timeout_s=20.0, process="episode")
    with contextlib.closing(EnvironmentPool(config).start()) as pool:
        assert call(opened(pool), "half") == {"value": "?"}
        pool._host._popen.kill()
        pool._host._popen.wait()
        file.write_text(HOSTILE + "#")
        says(user_error(opened, pool), f"env.classes={file}:Hostile: the file has changed")
    assert "died; starting it again" in caplog.text
