"""Finds and loads user functions, named in settings as `path/to/file.py:name`. Finding does not run the file."""

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from rlhf.errors import UserError, did_you_mean, nearest, nearest_path

CUSTOM_CLS, ENV_CLASSES = "data.custom_cls", "env.classes"
"""The settings that may name a class instead of a function."""
_files_loading: list[Path] = []


def split_spec(setting: str, spec: str) -> tuple[Path, str]:
    """Return the absolute path and the name of `path/to/file.py:name`, or raise UserError for another form."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UserError(
            f"{setting}={spec} is not of the form path/to/file.py:name.{did_you_mean(likely_spec(spec))} Write the "
            f"file, a colon and the {'class' if setting in (CUSTOM_CLS, ENV_CLASSES) else 'function'}."
        )
    return Path(path).expanduser().absolute(), name


def likely_spec(spec: str) -> str | None:
    """Return `file.py:name` for a spec with another separator, such as `file.name`; None for any other text."""
    file, _, name = spec.replace(":", ".").rpartition(".")
    file = file.removesuffix(".py")
    if not file or not name.isidentifier() or spec.endswith(".py"):
        return None
    inside = f"{file.replace('.', '/')}.py"
    return f"{inside if Path(inside).is_file() else f'{file}.py'}:{name}"


def find_function(setting: str, spec: str) -> ast.arguments | None:
    """Check that the file exists, is Python and defines the name at its top level, without running the file.

    Returns:
        The function's parameters; None if the name is bound by anything but a `def`, such as an import.

    Raises:
        UserError: a check fails, or the function is async. The message has the setting, its value and the remedy.
    """
    binding = find_definition(setting, spec)
    if isinstance(binding, ast.AsyncFunctionDef):
        raise UserError(
            f"{setting}={spec}: the function is async, and the trainer would not await it. Make it a plain function "
            "(with asyncio.run inside)."
        )
    return None if binding is None else binding.args


def find_definition(setting: str, spec: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the definition, also of an async function. Returns None and raises errors as `find_function`."""
    binding = _find_binding(setting, spec)
    if isinstance(binding, ast.ClassDef) and setting not in (CUSTOM_CLS, ENV_CLASSES):
        raise UserError(_is_class(f"{setting}={spec}", binding.name))
    return binding if isinstance(binding, ast.FunctionDef | ast.AsyncFunctionDef) else None


def find_class(setting: str, spec: str) -> ast.ClassDef | None:
    """Return the definition of a class; None if the name is bound by anything but a `class`, such as an import. Raise
    UserError as `find_function`, and for a function."""
    binding = _find_binding(setting, spec)
    if isinstance(binding, ast.FunctionDef | ast.AsyncFunctionDef):
        raise UserError(f"{setting}={spec}: {binding.name} is a function. Name a class.")
    return binding if isinstance(binding, ast.ClassDef) else None


def _find_binding(setting: str, spec: str) -> ast.AST:
    """Return the top-level node that binds the name; raises errors as `find_function`."""
    path, name = split_spec(setting, spec)
    shown = f"{setting}={spec}"
    if not path.is_file():
        found = nearest_path(path, lambda other: other.suffix == ".py" and other.is_file())
        raise UserError(f"{shown}: no file {path}.{did_you_mean(found)} Correct the path (relative to {Path.cwd()}).")
    try:
        tree = ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError, OSError) as error:
        raise UserError(f"{shown}: the file cannot be read as Python: {error}. Correct it.") from error
    bound = {each: binding for node in tree.body for each, binding in _bound(node)}
    if name not in bound:
        raise UserError(
            f"{shown}: {path.name} defines no {name!r}.{did_you_mean(nearest(name, bound))} Correct the name."
        )
    return bound[name]


def check_positional(
    setting: str, spec: str, arguments: Sequence[str], more: Collection[str] = ()
) -> Collection[str] | None:
    """Check the function as `find_function` does, and that it accepts `arguments` (names, for the message) by position.

    Args:
        more: names of arguments that are passed by keyword to a function that accepts them.

    Returns:
        The names in `more` that the function accepts; None if its parameters are unknown.
    """
    parameters = find_function(setting, spec)
    if parameters is None:
        return None
    by_position = parameters.posonlyargs + parameters.args
    required = [a.arg for a in by_position[len(arguments) : len(by_position) - len(parameters.defaults)]]
    keywords = [
        a.arg for a, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if default is None
    ]
    too_few = len(by_position) < len(arguments) and parameters.vararg is None
    if too_few or {*required, *keywords} - set(more):
        rest = [f"*{parameters.vararg.arg}"] if parameters.vararg else []
        has = ", ".join([*(a.arg for a in by_position), *rest, *(f"{name}=" for name in keywords)])
        raise UserError(
            f"{setting}={spec}: the function takes ({has}), but is called with {len(arguments)} arguments: "
            f"({', '.join(arguments)}). Correct its parameters."
        )
    named = {
        a.arg
        for a in [*parameters.args[max(0, len(arguments) - len(parameters.posonlyargs)) :], *parameters.kwonlyargs]
    }
    return set(more) if parameters.kwarg else named & set(more)


def hash_of_files(functions: Sequence[str]) -> str:
    """Return a hash of the users' files among `functions`, without the files that they import.

    Args:
        functions: `path/to/file.py:name`, absolute paths, or names of bundled functions, which are not hashed.
    """
    paths = [split_spec("functions", each)[0] for each in functions if ".py:" in each]
    paths += [path for each in functions if ".py:" not in each and (path := Path(each)).is_absolute()]
    return xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_128_digest(path.read_bytes()) for path in paths))


def hash_at_start(setting: str, functions: Sequence[str]) -> str:
    """Return `hash_of_files`, for `check_unchanged` later. Raise UserError if a file cannot be read."""
    try:
        return hash_of_files(functions)
    except OSError as error:
        raise UserError(
            f"{setting}={','.join(functions)}: {error.filename} cannot be read ({error.strerror}). Restore the file."
        ) from None


def check_unchanged(setting: str, functions: Sequence[str], before: str) -> None:
    """Raise UserError unless the files of the user functions still have the hash `before` of `hash_of_files`."""
    try:
        same = hash_of_files(functions) == before
    except OSError:
        same = False
    if not same:
        raise UserError(
            f"{setting}={','.join(functions)}: the file has changed since the run started, and a new process would run "
            "the new code. Restore the file and continue by the same command, accept the new file with "
            "trainer.allow_config_change=true, or begin a new run with trainer.experiment_name=NAME."
        )


def load_function(setting: str, spec: str, *, may_be_async: bool = False) -> Callable[..., Any]:
    """Run the file, once per process, and return the function.

    The file can import modules in its folder, by their names or relatively.

    Raises:
        UserError: as `find_function`, or the file raises, or the name is not a function.
    """
    (find_definition if may_be_async else find_function)(setting, spec)
    path, name = split_spec(setting, spec)
    try:
        function = getattr(_module(path), name)
    # Catch SystemExit, too, which a script without a __main__ guard may raise.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(".")
        raise UserError(f"{setting}={spec} cannot be imported: {reason}. Correct the file.") from error
    if isinstance(function, type) and setting not in (CUSTOM_CLS, ENV_CLASSES):
        raise UserError(_is_class(f"{setting}={spec}", name))
    if not callable(function):
        raise UserError(f"{setting}={spec} is not a function, but of type {type(function).__name__}. Name a function.")
    return function


def _is_class(shown: str, name: str) -> str:
    return f"{shown}: {name} is a class, so calling it only creates an object. Write a function (def) that uses it."


@functools.cache
def _module(path: Path) -> ModuleType:
    # Append the folder to the end of sys.path, so that a user's file cannot replace a module of the trainer.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # The folder becomes a package, for `from .utils import ...`.
    folder = f"user_folder {path.parent}".replace(".", "%2E")
    if folder not in sys.modules:
        sys.modules[folder] = package = ModuleType(folder)
        package.__path__ = [str(path.parent)]
    name = f"{folder}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass in the file looks up its module here
    _files_loading.append(path)
    try:
        spec.loader.exec_module(module)
    finally:
        _files_loading.pop()
    return module


def file_being_loaded() -> Path | None:
    """Return the user's file that this process is importing at this moment, or None."""
    return _files_loading[-1] if _files_loading else None


def _bound(node: ast.stmt) -> list[tuple[str, ast.AST]]:
    """Return the names that a top-level statement binds, also under if, try and with, each with its binding node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [(node.name, node)]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name.partition(".")[0], node) for alias in node.names]
    if isinstance(node, ast.If | ast.Try | ast.With):
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        handled = [child for handler in getattr(node, "handlers", []) for child in handler.body]
        return [pair for child in inner + handled for pair in _bound(child)]
    return [(n.id, node) for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
