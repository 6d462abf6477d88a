"""Objects between ranks: what arrives is equal, no message runs code, and no rank unpickles what another rank sends."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.checkpoint.save.writer import RankFiles
from rlhf.errors import UserError
from rlhf.ranks.object_codec import decode, encode, sendable
from rlhf.rollout.servers.client import ServerFailure
from rlhf.storage.disk_errors import DamagedCheckpoint, is_unfixable
from rlhf.storage.files import WrittenFile
from rlhf.storage.shard_index import FileShards
from tests.support.launching import ROOT

PICKLING = re.compile(r"(dist|distributed|c10d)\.\w+_object(_list)?\b|import .*\b\w+_object_list\b")
"""Collectives of torch that unpickle what they receive."""

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.integers())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.text(), inner)
        | st.frozensets(KEYS)
        | st.sets(KEYS)
    ),
)


def typed(value: Any) -> str:
    """Return a text that differs where types or the order of entries differ, but not with the order of sets."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value)} {sorted(map(repr, value))}"
    if isinstance(value, (list, tuple)):
        return f"{type(value)} {list(map(typed, value))}"
    if isinstance(value, dict):
        return f"{type(value)} {[(typed(key), typed(each)) for key, each in value.items()]}"
    return repr(value)


@given(VALUES)
def test_plain_values_arrive_as_they_were(value):
    assert typed(decode(encode(value))) == typed(value)


def test_what_a_checkpoint_sends_arrives():
    files = RankFiles([WrittenFile("a", 3, "f" * 32)], {"actor": FileShards("a", 0, b"\x00\xff", "t")}, {"actor": 0.5})
    for value in (files, Counter({3: 1 << 200}), Path("/a/b"), [(1 << 100_000) - 1, -(1 << 63)], math.inf):
        assert decode(encode(value)) == value
    assert decode(encode(Counter()))["none"] == 0
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode("\ud800")) == "\ud800"


class DiskError(OSError):
    """An error of another package."""


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (OSError(28, "full", "/a"), OSError),
        (FileNotFoundError(2, "gone", "/a"), FileNotFoundError),
        (UserError("trainer.nproc=3"), UserError),
        (DamagedCheckpoint("step 3"), DamagedCheckpoint),
        (ServerFailure("late", hung=True), ServerFailure),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), UnicodeDecodeError),
        (KeyError(3), KeyError),
    ],
)
def test_errors_arrive_with_their_class_and_attributes(error, arrives):
    found = decode(encode(sendable(error)))
    assert type(found) is arrives
    assert (str(found), vars(found)) == (str(error), vars(error))
    assert is_unfixable(found) == is_unfixable(error)


def test_other_errors_arrive_in_the_nearest_class():
    """All ranks must handle an error alike, so a ValueError stays one."""
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert type(sendable(caught.value)) is ValueError
    assert type(sendable(DiskError("broken"))) is OSError
    assert str(sendable(DiskError("broken"))) == "DiskError: broken"


def test_other_objects_are_rejected_by_their_sender():
    for value in (object(), print, DiskError, pytest, lambda: 1, {"a": [object()]}):
        with pytest.raises(TypeError, match="cannot send an object of type"):
            encode(value)


def message_of(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "message",
    [
        {"record": [["subprocess", "Popen"], []]},
        {"record": [["rlhf.errors", "UserError"], []]},
        {"record": [["rlhf.ranks.lock", "os"], []]},
        {"error": [["os", "system"], {"tuple": ["true"]}, {"dict": {}}]},
        {"error": [["builtins", "eval"], {"tuple": ["1"]}, {"dict": {}}]},
        {"error": [["rlhf.storage.files", "WrittenFile"], {"tuple": ["1"]}, {"dict": {}}]},
    ],
)
def test_a_message_names_nothing_but_records_and_errors(message):
    with pytest.raises(ValueError, match="is not"):
        decode(message_of(message))


def test_no_rank_unpickles_what_another_rank_sends():
    sources = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "rlhf").rglob("*.py")}
    assert [path for path, source in sources.items() if PICKLING.search(source)] == []
    unpickling = {str(path) for path, source in sources.items() if re.search(r"^import pickle$", source, re.MULTILINE)}
    assert {path for path in unpickling if not path.startswith("rlhf/convert/")} == set()
