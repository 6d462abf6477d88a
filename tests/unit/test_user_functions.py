import re
import sys

import pytest

from rlhf.config.user_functions import check_positional, find_function, likely_spec, load_function
from rlhf.errors import UserError
from tests.support.refusals import says

FILE = """
import functools
import os.path
from math import sqrt as root

def plain(a, b): ...
async def waits(a, b): ...
class Scorer: ...
if True:
    def inside(a, b): ...
try:
    import no_such_module
except ImportError:
    def fallback(a, b): ...
partial = functools.partial(plain, 1)
seven = 7

def three(a, b, c): ...
def optional(a, b, c=None, *, d=1): ...
def one(a): ...
def rest(*arguments): ...
def keyword(a, b, *, c): ...
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("name", ["plain", "inside", "fallback"])
def test_functions_are_found_with_their_parameters(file, name):
    assert [a.arg for a in find_function("x.y", f"{file}:{name}").args] == ["a", "b"]


@pytest.mark.parametrize("name", ["root", "os", "partial", "seven"])
def test_names_bound_in_other_ways_are_found(file, name):
    assert find_function("x.y", f"{file}:{name}") is None


def test_a_class_instead_of_a_function_is_rejected(file):
    (file.parent / "other.py").write_text("from collections import Counter\n")
    for function, spec in ((find_function, f"{file}:Scorer"), (load_function, f"{file.parent}/other.py:Counter")):
        message = error_message(function, "x.y", spec)
        name = spec.rpartition(":")[2]
        assert message.startswith(
            f"x.y={spec}: {name} is a class, so calling it only creates an object. Write a function"
        )


def error_message(function, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("spec", ["file.py", "file.py:", ":name", "file:name", "file.py:a b"])
def test_a_spec_must_have_the_form_path_colon_name(spec):
    says(error_message(find_function, "x.y", spec), f"x.y={spec} ", "path/to/file.py:name")


def test_likely_spec_guesses_the_intended_spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("")
    meant = {"a.b.f": "a/b.py:f", "a/b.f": "a/b.py:f", "x:f": "x.py:f", "x.py.f": "x.py:f", "x.py": None, "x": None}
    assert {spec: likely_spec(spec) for spec in meant} == meant


def test_a_missing_file_or_function_suggests_the_nearest(file):
    wrong = file.with_name("function.py")
    says(error_message(find_function, "x.y", f"{wrong}:plain"), f"no file {wrong}.", f"Did you mean {file}?")
    assert "functions.py defines no 'plane'. Did you mean plain?" in error_message(
        find_function, "x.y", f"{file}:plane"
    )
    assert "the function is async" in error_message(find_function, "x.y", f"{file}:waits")


@pytest.mark.parametrize("content", [b"def f(:\n", b"\xff\xfe\x00", b"a\x00b"])
def test_a_file_that_is_not_python_is_an_error(file, content):
    file.write_bytes(content)
    message = error_message(find_function, "x.y", f"{file}:f")
    assert "the file cannot be read as Python" in message
    assert "unknown" not in message


@pytest.mark.parametrize("name", ["plain", "optional", "rest", "root"])
def test_two_arguments_fit(file, name):
    check_positional("x.y", f"{file}:{name}", ("a", "b"))


@pytest.mark.parametrize(("name", "takes"), [("three", "(a, b, c)"), ("one", "(a)"), ("keyword", "(a, b, c=)")])
def test_two_arguments_do_not_fit(file, name, takes):
    assert error_message(check_positional, "x.y", f"{file}:{name}", ("a", "b")) == (
        f"x.y={file}:{name}: the function takes {takes}, but is called with 2 arguments: (a, b). Correct its "
        "parameters."
    )


def test_a_file_runs_once_and_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("runs = []\n")
    (tmp_path / "counted.py").write_text(
        "from dataclasses import dataclass\nimport beside_it\nbeside_it.runs.append(1)\n"
        "@dataclass\nclass Point:\n    x: 'int'\ndef a(): return len(beside_it.runs)\ndef b(): return Point(2).x\n"
    )
    assert load_function("x.y", f"{tmp_path}/counted.py:a")() == 1
    assert load_function("x.y", f"{tmp_path}/counted.py:b")() == 2
    assert load_function("x.y", f"{tmp_path}/counted.py:a")() == 1


def test_a_file_of_a_package_imports_relatively(tmp_path):
    (folder := tmp_path / "v1.2" / "scores").mkdir(parents=True)
    (folder / "__init__.py").write_text("from . import helper\nfrom .helper import two\ndef of(): return two()\n")
    (folder / "helper.py").write_text("def two(): return 2\n")
    (folder / "batch.py").write_text("from .helper import two\ndef twice(): return 2 * two()\n")
    assert load_function("x.y", f"{folder / '__init__.py'}:of")() == 2
    assert load_function("x.y", f"{folder / 'batch.py'}:twice")() == 4


def test_a_file_hides_no_module_of_others(tmp_path):
    (tmp_path / "fractions.py").write_text("def f(): ...\n")
    load_function("x.y", f"{tmp_path}/fractions.py:f")
    sys.modules.pop("fractions", None)
    import fractions

    assert hasattr(fractions, "Fraction")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0\ndef f(): ...\n", "cannot be imported: ZeroDivisionError: division by zero. Correct the file."),
        ("import sys\nsys.exit(3)\ndef f(): ...\n", "cannot be imported: SystemExit: 3. Correct the file."),
        ("f = 7\n", "is not a function, but of type int. Name a function."),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text)
    assert re.fullmatch(
        f"x.y={tmp_path}/bad.py:f {re.escape(message)}", error_message(load_function, "x.y", f"{tmp_path}/bad.py:f")
    )
