"""Import graph of the package, read from its code: no cycle, no upward import, and `Config` only in a few modules.

Imports inside functions and under TYPE_CHECKING count like all others.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import rlhf

PACKAGE = Path(rlhf.__file__).parent

STOREYS = (
    {
        *("__main__", "train", "evaluate", "samples", "plan", "compare", "report", "status", "doctor", "translate"),
        *("checkpoint.__main__", "launch.kubernetes.__main__", "launch.ray.rank", "launch.slurm.__main__"),
    },
    {"convert"},
    {"api", "cli"},
    {"compose", "launch"},
    {"worker"},
    {"lifecycle"},
    {"assemble", "planning", "diagnosis"},
    {"loop"},
    {"experience", "learning", "checkpoint", "tracking"},
    {"batch", "rollout", "reward", "environments", "data", "backends", "models", "algorithms"},
    {"storage", "ranks"},
    {"config"},
    {"errors", "events", "numerics", "printable", "typed_json"},
)
"""The rooms (modules and folders of the package) by storey, from the top down. A room imports from its own storey and
from lower ones."""

CHECKPOINT_LAYERS = (
    {"checkpointer", "verbs", "__main__"},
    {"memory"},
    {"start"},
    {"save"},
    {"load", "remote", "export"},
    {"commit"},
    {"state"},
)
"""The rooms inside `checkpoint/`, from the top down; one imports from its own folder and from the layers below."""

MAY_IMPORT_CHECKPOINT = {"loop", "worker", "lifecycle", "assemble", "evaluate", "diagnosis"} | {
    "checkpoint",
    "checkpoint.__main__",
    "convert",
}
COMMANDS_IN_ROOMS = {
    "rlhf.checkpoint.__main__",
    "rlhf.launch.kubernetes.__main__",
    "rlhf.launch.ray.rank",
    "rlhf.launch.slurm.__main__",
}
"""Thin commands whose files are in a room's folder, but which may import from the rooms above it."""

MAY_SEE_THE_WHOLE_CONFIG = {
    "rlhf.api",
    "rlhf.assemble.frozen_policy",
    "rlhf.assemble.replicas",
    "rlhf.assemble.rollouts",
    "rlhf.assemble.run",
    "rlhf.cli.submission",
    "rlhf.cli.sweep",
    "rlhf.compose",
    "rlhf.diagnosis.cluster_checks",
    "rlhf.diagnosis.memory_checks",
    "rlhf.diagnosis.node_checks",
    "rlhf.evaluate.target_settings",
    "rlhf.evaluate.results",
    "rlhf.launch.banner",
    "rlhf.launch.ray.driver",
    "rlhf.launch.supervisor",
    "rlhf.lifecycle",
    "rlhf.planning.check",
    "rlhf.planning.combination",
    "rlhf.planning.memory_plan",
    "rlhf.planning.remedies",
    "rlhf.worker",
}
"""Modules outside `rlhf.config` that import `Config`; every other module takes sections of it."""
LONGEST_FUNCTION = 60
"""Lines from `def` to the end."""

TWINS: dict[str, set[str]] = {
    "actor.py": {"config/schema", "learning"},
    "critic.py": {"config/schema", "learning"},
    "guards.py": {"config/schema", "learning"},
    "launcher.py": {"config/schema", "ranks"},
    "reward_model.py": {"config/schema", "reward"},
    "plan.py": {".", "cli"},
    "compare.py": {".", "cli", "config"},
    "samples.py": {".", "cli"},
    "report.py": {".", "cli", "tracking"},
    "status.py": {".", "cli", "ranks"},
    "doctor.py": {".", "cli"},
    "translate.py": {".", "cli"},
}
"""Names that several files have: a section of the configuration and the component that uses it; a command and its
code; the comparisons of runs and of configurations."""


@cache
def trees() -> dict[str, ast.Module]:
    """Return every parsed module by its dotted name; an `__init__` module has the name of its folder."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yield the modules that `tree` imports, each with the imported name (None if the module itself is imported)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "no relative imports: this test would not see them"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, None) if inner in trees() else (node.module or "", alias.name)


@cache
def graph() -> dict[str, set[str]]:
    """Return for each module of the package the modules of the package that it imports."""
    return {
        name: {target for target, _ in imports(tree) if target in trees()} - {name} for name, tree in trees().items()
    }


def room(module: str) -> str:
    if module in COMMANDS_IN_ROOMS:
        return module.partition(".")[2]
    return module.split(".")[1] if "." in module else ""


def storey(module: str) -> int:
    return next(i for i, rooms in enumerate(STOREYS) if room(module) in rooms)


def reached(module: str) -> set[str]:
    """Everything that an import of `module` may import."""
    seen, todo = set(), [module]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += graph()[name]
    return seen


def test_every_folder_has_a_layer():
    rooms = {room(name) for name in trees()} - {""}
    assert rooms == set().union(*STOREYS)


def test_there_is_no_import_cycle():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_no_module_imports_a_higher_layer():
    arrows = [(a, b) for a, targets in graph().items() for b in sorted(targets) if room(a) and room(b)]
    assert arrows, "an empty graph proves nothing"
    assert [f"{a} -> {b}" for a, b in arrows if storey(b) < storey(a)] == []


def test_only_listed_folders_import_the_checkpoint_package():
    users = {room(a) for a, targets in graph().items() if any(room(b) == "checkpoint" for b in targets)}
    assert users <= MAY_IMPORT_CHECKPOINT


def test_layers_inside_the_checkpoint():
    def layer(module: str) -> int:
        return next(i for i, layer in enumerate(CHECKPOINT_LAYERS) if module.split(".")[2] in layer)

    own = [name for name in trees() if name.startswith("rlhf.checkpoint.")]
    assert {name.split(".")[2] for name in own} == set().union(*CHECKPOINT_LAYERS)
    arrows = [(a, b) for a in own for b in sorted(graph()[a]) if b in own and a.split(".")[2] != b.split(".")[2]]
    assert arrows, "an empty graph proves nothing"
    assert [f"{a} -> {b}" for a, b in arrows if layer(b) <= layer(a)] == []


def test_only_the_command_reaches_the_converters():
    """Both imports and module names in strings, as for `importlib`, count."""
    named = {name: {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)} for name, tree in trees().items()}
    reaches = {a for a in graph() if any(room(b) == "convert" for b in graph()[a] | (named[a] & trees().keys()))}
    assert {name for name in reaches if room(name) != "convert"} == {"rlhf.checkpoint.__main__"}


def test_the_storage_package_imports_events_only():
    targets = {b for a in graph() if room(a) == "storage" for b in graph()[a]}
    assert {room(b) for b in targets} <= {"storage", "events"}


def test_a_rank_imports_nothing_of_the_launcher():
    assert [name for name in sorted(reached("rlhf.worker")) if room(name) == "launch"] == []


def test_only_listed_modules_import_the_whole_config():
    users = {name for name, tree in trees().items() if ("rlhf.config", "Config") in set(imports(tree))}
    assert users, "somebody does"
    assert {name for name in users if room(name) != "config"} == MAY_SEE_THE_WHOLE_CONFIG


def test_no_function_is_longer_than_a_page():
    lengths = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_hydra_is_imported_by_the_composition_alone():
    users = {name for name, tree in trees().items() if any(m.split(".")[0] == "hydra" for m, _ in imports(tree))}
    assert users == {"rlhf.compose", "rlhf.config.config_folder"}


def test_a_class_name_has_one_meaning():
    places = defaultdict(list)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_a_file_name_has_one_meaning():
    places = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in ("__init__", "__main__"):
            places[path.name].add(path.parent.relative_to(PACKAGE).as_posix())
    assert {name: folders for name, folders in places.items() if len(folders) > 1} == TWINS


def trees_of_tests() -> dict[str, ast.Module]:
    paths = (PACKAGE.parent / "tests").rglob("*.py")
    return {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(p.read_text()) for p in paths}


def test_no_test_imports_another():
    tests = {name: tree for name, tree in trees_of_tests().items() if ".test_" in name}
    assert tests, "an empty folder proves nothing"
    arrows = [
        (name, *arrow)
        for name, tree in tests.items()
        for arrow in imports(tree)
        if ".test_" in ".".join(map(str, arrow))
    ]
    assert arrows == []


def test_only_tests_support_preload_configures_the_fork_server():
    """Python keeps one list of modules for the server, and the module that sets it last wins."""
    users = set()
    for name, tree in trees_of_tests().items():
        called = {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if called & {"get_context", "set_forkserver_preload", "set_start_method"}:
            users.add(name)
    assert users == {"tests.support.preload"}
