"""`reward.function=path/to/file.py:name`: found and checked without running the file."""

import ast
import difflib
from pathlib import Path

from rlhf.config.reward import RewardConfig
from rlhf.errors import UserError

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")


def split_spec(spec: str) -> tuple[Path, str]:
    """The absolute path and the name of `path/to/file.py:name`; UserError if it is not of that form."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise UserError(
            f"reward.function={spec} is not of the form path/to/file.py:name. Write the file, a colon and the function."
        )
    return Path(path).expanduser().absolute(), name


def check_reward(config: RewardConfig) -> None:
    """UserError if `reward.function` names no file, no Python, no function in it, or one without the four keywords."""
    if config.function is None:
        return
    path, name = split_spec(config.function)
    said = f"reward.function={config.function}"
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")]
        raise UserError(
            f"{said}: no file {path}.{_nearest(path.name, siblings)} Correct the path (it starts from {Path.cwd()})."
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{said}: the file cannot be read as Python: {error}. Correct it.") from error
    names = {bound: node for node in tree.body for bound in _bound(node)}
    if name not in names:
        raise UserError(
            f"{said}: {path.name} defines no {name!r}.{_nearest(name, names)} Correct the name after the colon."
        )
    node = names[name]
    if isinstance(node, ast.AsyncFunctionDef):
        raise UserError(
            f"{said}: the function is async, and nobody would await it. Make it a plain one (asyncio.run inside)."
        )
    if isinstance(node, ast.FunctionDef):
        _check_signature(said, node.args)


def _bound(node: ast.stmt) -> list[str]:
    """The names that a top-level statement binds, also under if and try."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.If | ast.Try | ast.With):
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        handled = [child for handler in getattr(node, "handlers", []) for child in handler.body]
        return [name for child in inner + handled for name in _bound(child)]
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _check_signature(said: str, args: ast.arguments) -> None:
    taken = {a.arg for a in args.args + args.kwonlyargs}
    missing = [k for k in KEYWORDS if k not in taken]
    if missing and args.kwarg is None:
        raise UserError(
            f"{said}: the function does not take {', '.join(missing)}. "
            f"It is called with {', '.join(KEYWORDS)}; add **kwargs."
        )
    required = args.args[: len(args.args) - len(args.defaults)]
    required += [a for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    unfilled = [a.arg for a in args.posonlyargs + required if a.arg not in KEYWORDS]
    if unfilled:
        raise UserError(
            f"{said}: the function needs {', '.join(unfilled)}, but is called with "
            f"{', '.join(KEYWORDS)} only. Give a default."
        )


def _nearest(name: str, choices: object) -> str:
    close = difflib.get_close_matches(name, list(choices), n=3, cutoff=0.5)  # type: ignore[call-overload]
    return f" Did you mean {' or '.join(close)}?" if close else ""
