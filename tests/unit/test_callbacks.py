"""Callbacks that settings name: their rules, their arguments, and a resume with other callbacks."""

from pathlib import Path

import pytest

from rlhf import api
from rlhf.config import Config
from rlhf.config.compare import compare
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from rlhf.launch.callbacks import load_callbacks
from tests.support.refusals import says, user_error

FILE = """
import os
from pathlib import Path
def note(*words):
    with Path(__file__).with_suffix(".txt").open("a") as file: print(*words, file=file)
def plain(step, metrics): note("plain", step)
def more(step, metrics, prefix="", *, last): note(prefix, step, last)
def everything(step, metrics, **rest): note(rest)
def one(step): pass
def breaks(step, metrics): raise ValueError("enough")
def leaves(step, metrics): raise SystemExit
def moves(step, metrics): os.chdir("/")
class Whole: pass
"""


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "watch.py").write_text(FILE)
    return tmp_path / "watch.py"


def config_of(*callbacks: str, **kwargs: object) -> Config:
    config = Config()
    config.model.path = config.data.train_files = "org/name"
    config.trainer.callbacks, config.trainer.callback_kwargs = list(callbacks), kwargs
    return config


@pytest.mark.parametrize(
    ("names", "kwargs", "facts"),
    [
        (["one"], {}, ["trainer.callbacks=", "one", "(step, metrics)"]),
        (["more"], {}, ["trainer.callbacks=", "more", "last="]),
        (["Whole"], {}, ["trainer.callbacks=", "Whole is a class"]),
        (["plian"], {}, ["trainer.callbacks=", "Did you mean plain?"]),
        (["plain"], {"last": 2}, ["trainer.callback_kwargs=", "last", "trainer.callbacks="]),
        ([], {"last": 2}, ["trainer.callback_kwargs=", "last"]),
        (["everything"], {"step": 2}, ["trainer.callback_kwargs=", "step"]),
    ],
)
def test_invalid_callbacks_are_rejected(file, names, kwargs, facts):
    says(user_error(validate, config_of(*(f"{file}:{name}" for name in names), **kwargs), {}), *facts)


def test_each_callback_gets_the_arguments_that_it_accepts(file):
    config = config_of(*(f"{file}:{name}" for name in ("plain", "more", "everything")), prefix="x", last=3)
    validate(config, {})
    for function in load_callbacks(config.trainer):
        function(4, {"reward/mean": 1.0})
    written = file.with_suffix(".txt").read_text().splitlines()
    assert written == ["plain 4", "x 4 3", "{'prefix': 'x', 'last': 3}"]


def test_an_error_names_the_callback_and_its_line(file):
    (function,) = load_callbacks(config_of(f"{file}:breaks").trainer)
    says(user_error(function, 7, {}), f"trainer.callbacks={file}:breaks", "step 7", "watch.py", "ValueError: enough")
    config = config_of(f"{file}:breaks")
    config.trainer.overwrite = True
    (function,) = load_callbacks(config.trainer)
    says(user_error(function, 7, {}), "The same command without trainer.overwrite=true continues it.")


def test_a_callback_that_calls_exit_is_an_error_and_not_the_end_of_the_command(file):
    (function,) = load_callbacks(config_of(f"{file}:leaves").trainer)
    says(user_error(function, 7, {}), f"trainer.callbacks={file}:leaves", "step 7", "SystemExit")


def test_a_callback_changes_no_working_directory(file):
    config = config_of(f"{file}:moves")
    (function,) = load_callbacks(config.trainer)
    before = Path.cwd(), config.run_dir
    function(7, {})
    assert (Path.cwd(), config.run_dir) == before


def test_the_run_directory_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    config = config_of()
    before = config.run_dir
    monkeypatch.chdir(tmp_path)
    assert config.run_dir == before
    assert config_of().run_dir != before


def test_a_resume_may_have_other_callbacks(file):
    diff = compare(config_of(), config_of(f"{file}:plain"))
    assert [change.key for change in diff.harmless] == ["trainer.callbacks"]
    assert not diff.trajectory


def test_callbacks_under_torchrun_are_rejected(file, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError) as raised:
        api.start(config_of(f"{file}:plain"), [])
    says(raised.value, f"{file}:plain", "torchrun")
