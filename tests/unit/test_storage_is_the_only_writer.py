"""No module outside `rlhf/storage/` writes, syncs, renames, links or removes files: checked in the source code."""

import ast
from collections import Counter
from pathlib import Path

import rlhf

ROOT = Path(rlhf.__file__).parent
OF_ANY_OBJECT = {"write_text", "write_bytes", "mkdir", "touch", "rename", "unlink", "rmdir", "rmtree", "symlink_to"}
OF_ANY_OBJECT |= {"hardlink_to", "save_pretrained", "save_file"}
"""Names that only a Path, a file system or a model has."""
OF_A_MODULE = {
    "os": {
        "fsync",
        "fdatasync",
        "rename",
        "renames",
        "replace",
        "link",
        "symlink",
        "unlink",
        "remove",
        "rmdir",
        "mkdir",
    }
    | {"makedirs", "removedirs", "truncate", "ftruncate", "pwrite", "pwritev", "sendfile"},
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move", "rmtree"},
    "torch": {"save"},
    "numpy": {"save", "savez"},
    "np": {"save", "savez"},
}
ALLOWED = {
    ("environments/agent_start.py", "fdopen"): "the standard streams of a program",
    ("models/tiny.py", "save_pretrained"): "makes the bundled policy, offline, in a folder that its caller gives",
    ("models/tiny.py", "write_text"): "its model card",
    ("models/tiny_agent.py", "save_pretrained"): "makes the bundled agent's policy, in a folder that its caller gives",
    ("models/tiny_agent.py", "write_text"): "its chat template and model card",
    ("models/loading.py", "save_pretrained"): "into a temporary folder, only to read the bytes back",
    ("checkpoint/remote/remote_store.py", "open"): "an object of the remote, over fsspec",
    ("convert/torch_file.py", "torch.save"): "into memory, all but the tensors",
    ("ranks/lock.py", "os.open"): "a file lock: created once, opened to be locked",
    ("ranks/lock.py", "os.ftruncate"): "a file lock: its holder's name, for users",
    ("ranks/lock.py", "os.pwrite"): "a file lock: its holder's name, for users and the holder's peers",
    ("ranks/lock.py", "os.fsync"): "a file lock: its holder's name, for peers on other nodes",
    ("ranks/open_files.py", "os.open"): "the null device, in the place of a stream that is closed",
    ("ranks/status.py", "os.open"): "one page that is rewritten in place at each event, which must cost microseconds",
    ("ranks/status.py", "os.pwrite"): "one page that is rewritten in place at each event, which must cost microseconds",
    ("ranks/status.py", "open"): "the file that a signal handler in C writes stacks to",
    ("reward/code_tests.py", "write_text"): "a program under test, in a temporary folder of its reward process",
    ("reward/kernel.py", "open"): "files of /proc, by which a process confines itself",
    ("tracking/run_output.py", "os.open"): "the null device, in the place of a terminal that is gone",
    ("rollout/servers/keeper.py", "open"): "a child process' standard output",
}


def writes_in(source: str) -> list[str]:
    """Return the names of the calls in `source` that change files; imports from `os` or `shutil` count as calls."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in OF_A_MODULE:
            found += [f"{node.module}.{a.name}" for a in node.names if a.name in OF_A_MODULE[node.module]]
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        of = (
            node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
        )
        if name in OF_A_MODULE.get(of, ()) or (of == "os" and name == "open" and "O_RDONLY" not in ast.dump(node)):
            found.append(f"{of}.{name}")
        elif isinstance(node.func, ast.Attribute) and name in OF_ANY_OBJECT:
            found.append(name)
        # A string has `replace` as well, with two arguments.
        elif name == "replace" and isinstance(node.func, ast.Attribute) and len(node.args) == 1 and not node.keywords:
            found.append("replace")
        elif name in ("open", "fdopen", "NamedTemporaryFile") and any(map(_writes, ast.walk(node))):
            found.append(name)
    return found


def _writes(node: ast.AST) -> bool:
    """Return whether `node` is a mode that opens a file for writing."""
    mode = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return bool(mode) and set(mode) <= set("rwxabt+") and bool(set(mode) & set("wxa+")) and len(mode) <= 3


def test_only_storage_writes():
    found = Counter(
        (str(path.relative_to(ROOT)), name)
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] != "storage"
        for name in writes_in(path.read_text())
    )
    assert not found.keys() - ALLOWED.keys(), "let rlhf/storage/files.py do it"
    assert not ALLOWED.keys() - found.keys(), "no longer needed"


def test_one_file_of_storage_writes():
    writing = {path.name for path in (ROOT / "storage").glob("*.py") if writes_in(path.read_text())}
    assert writing == {"files.py"}


def test_storage_needs_events_only():
    for path in (ROOT / "storage").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith("rlhf") or name.startswith(("rlhf.storage", "rlhf.events")), path


def test_every_kind_of_write_is_seen():
    lines = {
        "path.open('ab')": "open",
        "open(path, mode='w')": "open",
        "path.open(mode='r+b')": "open",
        "os.open(path, os.O_WRONLY)": "os.open",
        "os.fsync(file.fileno())": "os.fsync",
        "path.rename(other)": "rename",
        "path.replace(other)": "replace",
        "os.replace(path, other)": "os.replace",
        "os.link(path, other)": "os.link",
        "path.hardlink_to(other)": "hardlink_to",
        "(folder / name).unlink(missing_ok=True)": "unlink",
        "shutil.rmtree(path)": "shutil.rmtree",
        "path.parent.mkdir()": "mkdir",
        "os.truncate(path, 3)": "os.truncate",
        "path.touch()": "touch",
        "(folder / name).write_bytes(b'')": "write_bytes",
        "from os import rename": "os.rename",
        "from shutil import rmtree": "shutil.rmtree",
    }
    assert {line: writes_in(line) for line in lines} == {line: [name] for line, name in lines.items()}
    for line in (
        "path.open('rb')",
        "open(path)",
        "text.replace('a', 'b')",
        "os.open(path, os.O_RDONLY)",
        "names.remove(3)",
    ):
        assert writes_in(line) == []
