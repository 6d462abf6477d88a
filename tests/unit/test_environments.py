"""Environment classes: what is checked before a run, their saved states, and sessions that leave nothing behind."""

import os
import random
import time
from functools import partial
from pathlib import Path

import pytest

from rlhf.config.schema.env import EnvConfig
from rlhf.environments import free_text
from rlhf.environments.class_checks import check_environments, check_row
from rlhf.environments.definition import define
from rlhf.environments.saved_state import restore, saved
from rlhf.environments.sessions import EnvironmentFailed, EnvironmentPool, Session
from rlhf.errors import UserError

TOOL = '    def look(self, at: int) -> str:\n        """Look.\n\n        Args:\n            at: where.\n        """\n'
WRONG = {
    "class E:\n    def begin(self): pass\n" + TOOL: ("E", "reset"),
    "class E:\n    def reset(self, **row): pass\n    def look(self, at):\n        'Look.'\n": ("look", "at", "type"),
    "class E:\n    def reset(self, **row): pass\n    def look(self, at: int): pass\n": ("look", "docstring"),
    "def E(): pass\n": ("E", "class"),
    "class F: pass\n": ("E",),
}


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
    """The processes that descend from this one."""
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
        ends = pool.run([partial(episode, number) for number in range(1000)])
    finally:
        pool.close()
    assert {"failed", "rejected", "done"} == set(ends)
    deadline = time.monotonic() + 60
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not children() - before
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    assert folder is None or not folder.exists()
