"""Calls in the house that sync, found in the code itself, and records without the syncs of one of them."""

import ast
from dataclasses import replace
from pathlib import Path

import rlhf
from tests.support.recorded_files import Op, Site

ROOT = Path(rlhf.__file__).parent


FOR_OTHER_NODES = "ranks/lock.py"
"""Its sync shows other nodes of a network file system who holds a lock, and no lock outlives a power cut."""


def sync_calls() -> list[Site]:
    """Every call of `fsync`, `fsync_...` and `..._durably`, of whatever module or object."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path == ROOT / FOR_OTHER_NODES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in ("fsync", "fdatasync") or name.startswith("fsync_") or name.endswith("_durably"):
                    found.append((str(path.relative_to(ROOT)), node.lineno, node.col_offset))
    return found


def calls_before_a_rename() -> list[Site]:
    """The calls of `os.fsync` in functions that rename a file afterwards."""
    tree = ast.parse((ROOT / "storage" / "files.py").read_text())
    found = []
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        text = ast.unparse(function)
        if "fsync(file" in text and ".replace(path)" in text:
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            fsyncs = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "fsync"]
            found += [("storage/files.py", node.lineno, node.col_offset) for node in fsyncs]
    return found


def without(ops: list[Op], call: Site) -> list[Op]:
    """The operations as they would be if `call` synced nothing; as many, so that moments stay what they are."""
    return [replace(op, kind="nothing") if call in op.sites else op for op in ops]


def after_the_rename(ops: list[Op], call: Site) -> list[Op]:
    """The operations with each sync of a file by `call` that is followed by its rename made after that."""
    moved = list(ops)
    for number, op in enumerate(ops[:-1]):
        rename = ops[number + 1]
        if op.kind == "sync" and call in op.sites and rename.kind == "rename" and rename.path == op.path:
            moved[number : number + 2] = [rename, replace(op, path=rename.other)]
    return moved
