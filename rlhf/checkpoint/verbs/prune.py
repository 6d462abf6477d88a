"""Verb `prune`: removes checkpoints as retention would, and leftovers of killed runs. Loads no torch."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf.checkpoint.commit.manifest import Manifest, read_manifest
from rlhf.checkpoint.verbs.addresses import add_json, find_runs
from rlhf.checkpoint.verbs.pruning import PruningPlan, bytes_freed, plan_pruning, remove_planned, run_at_rest
from rlhf.checkpoint.verbs.runs import RULES, LocalCheckpoint, LocalRun, read_checkpoint, rules_of_save
from rlhf.checkpoint.verbs.shown import show_end, size_text
from rlhf.checkpoint.verbs.verify import verify_found
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_USER_ERROR, UserError, did_you_mean, nearest
from rlhf.printable import printable
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import step_of

HELP = "remove checkpoints as retention would, and leftovers of killed runs; without --yes, only list them"


DOCUMENT = (
    "`removed` (true with --yes), `runs`: `path`, `problem`, `rules`, `newest_whole` (step of the newest intact "
    "checkpoint, or null), `going` (what is or would be removed: `name`, `kind`: "
    "`checkpoint`, `set aside`, `leftover`; `bytes`; `left`: not removed), `kept` (steps), `bytes` (freed), `left` "
    "(names not removed)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a run directory, or a folder of run directories")
    parser.add_argument("--max-to-keep", metavar="N", help="keep the newest N; null keeps all")
    parser.add_argument("--keep-every", metavar="N", help="keep steps that are multiples of N; null keeps none")
    parser.add_argument("--keep-best", metavar="N", help="keep the best N")
    parser.add_argument(
        "--best-metric", metavar="NAME", help="metric that --keep-best ranks by; null: see checkpoint.best_metric"
    )
    parser.add_argument(
        "--set-aside", action="store_true", help="also remove global_step_N.damaged-K, .superseded-K, .incomplete-K"
    )
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--yes", action="store_true", help="remove, after reading every byte of the newest checkpoint")
    act.add_argument("--dry-run", action="store_true", help="only show, as without --yes")
    add_json(parser, DOCUMENT)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Prune the runs at PATH one after the other; after an error in a run, continue with the next run."""
    given = {
        name: value for name in RULES if (value := _parse_option(name, getattr(arguments, name))) is not _NOT_GIVEN
    }
    if "://" in arguments.path:
        raise UserError(
            f"{arguments.path}: prune works on local folders only. For a remote folder, set "
            "checkpoint.remote_max_to_keep in the run."
        )
    runs, problems = find_runs(arguments.path)
    worst = EXIT_CRASHED if problems else EXIT_DONE
    documents: list[dict[str, Any]] = []
    for found in runs:
        assert isinstance(found, LocalRun)
        try:
            if found.single_checkpoint:
                raise UserError(f"{found.name} is one checkpoint. Give its run directory.")
            document = _pruned(found, _rules(found, given), arguments)
        except (UserError, OSError) as error:
            if len(runs) == 1 and isinstance(error, UserError):
                raise
            document = {"path": found.name, "problem": _error_text(error, found)}
            worst = EXIT_USER_ERROR if isinstance(error, UserError) else max(worst, EXIT_CRASHED)
        if document.get("left") and worst == EXIT_DONE:
            worst = EXIT_CRASHED
        documents.append(document)
        if not arguments.json:
            for line in _lines(document, removed=arguments.yes):
                console.print(printable(line))
    show_end({"runs": documents, "removed": arguments.yes}, problems, console, in_json=arguments.json)
    return worst


_NOT_GIVEN: Any = object()


def _error_text(error: UserError | OSError, found: LocalRun) -> str:
    return str(error) if isinstance(error, UserError) else f"{error.filename or found.name}: {error.strerror}"


def _parse_option(name: str, text: str | None) -> Any:
    if text is None:
        return _NOT_GIVEN
    rule = next(field for field in fields(CheckpointConfig) if field.name == name).metadata
    option = f"--{name.replace('_', '-')}={text}"
    if name == "best_metric":
        if text == "null":
            return None
        if text not in rule["choices"]:
            choices = rule["choices"]
            raise UserError(f"{option}: must be one of {', '.join(choices)}.{did_you_mean(nearest(text, choices))}")
        return text
    may_be_null = rule["ge"] == 1
    if may_be_null and text == "null":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= rule["ge"]):
        raise UserError(f"{option}: must be a whole number of at least {rule['ge']}{' or null' * may_be_null}.")
    return int(text)


def _rules(found: LocalRun, given: Mapping[str, Any]) -> CheckpointConfig:
    stored = found.rules()
    for checkpoint in found.checkpoints if stored is None else ():
        manifest = read_checkpoint(checkpoint, checkpoint.manifest)
        if not isinstance(manifest, str) and (stored := rules_of_save(checkpoint, manifest)) is not None:
            break
    if stored is None and "max_to_keep" not in given:
        raise UserError(
            f"{found.name}: no settings of its run can be read (resolved.yaml, a checkpoint's config.yaml), so its "
            "retention is unknown. Give --max-to-keep, and --keep-every and --keep-best where they apply."
        )
    return replace(stored or CheckpointConfig(), **given)


def _pruned(found: LocalRun, rules: CheckpointConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    if not arguments.yes:
        plan = plan_pruning(found.path, rules, set_aside=arguments.set_aside, verify=_check_sizes)
        return _document(plan, bytes_freed(plan.going), [])
    with run_at_rest(found.path):
        plan = plan_pruning(
            found.path, rules, set_aside=arguments.set_aside, verify=lambda path: verify_found(LocalCheckpoint(path))
        )
        freed = bytes_freed(plan.going)
        return _document(plan, freed, remove_planned(plan))


def _check_sizes(path: Path) -> Manifest:
    """Return a checkpoint's manifest if its files exist with the right sizes, else raise
    DamagedCheckpoint. Read no bytes of the files."""
    manifest = read_manifest(path)
    here = manifest.expected_at(path)
    for name in here:
        LocalCheckpoint(path).files(manifest).check_entry(name)
    if len(here) < len(manifest.files):
        raise DamagedCheckpoint(f"{path} has {len(here)} of {len(manifest.files)} files")
    return manifest


def _document(plan: PruningPlan, freed: Mapping[Path, int], left: list[Path]) -> dict[str, Any]:
    kinds = ("checkpoint", plan.checkpoints), ("set aside", plan.aside), ("leftover", plan.leftovers)
    kept = [step_of(path) for path in plan.run_dir.iterdir() if step_of(path) is not None]
    return {
        "path": str(plan.run_dir),
        "problem": None,
        "rules": {name: value for name, value in asdict(plan.rules).items() if name in RULES},
        "newest_whole": plan.newest,
        "going": [
            {"name": path.name, "kind": kind, "bytes": freed[path], "left": path in left}
            for kind, paths in kinds
            for path in paths
            if path in freed
        ],
        "kept": sorted({step for step in kept if step is not None} - {step_of(path) for path in plan.checkpoints}),
        "bytes": sum(freed.values()),
        "left": [path.name for path in left],
    }


def _lines(document: dict[str, Any], *, removed: bool) -> list[str]:
    path = document["path"]
    if document["problem"] is not None:
        return [document["problem"]]
    if document["newest_whole"] is None:
        return [f"{path}: no checkpoint is intact, so nothing is removed: damaged checkpoints may be all that is left."]
    stay = ", ".join(map(str, document["kept"]))
    rules = ", ".join(f"{name}={'null' if value is None else value}" for name, value in document["rules"].items())
    lines = [f"{path}: {rules}"]
    verb = "removed" if removed else "would remove"
    for entry in document["going"]:
        kind = "" if entry["kind"] == "checkpoint" else f", {entry['kind']}"
        lines.append(f"  {verb} {entry['name']} ({size_text(entry['bytes'])}{kind})")
    keeps = "keeps" if removed else "would keep"
    lines.append(f"  {keeps} steps {stay}; the newest intact one is {document['newest_whole']}")
    if document["left"]:
        lines.append(f"  not removed because of disk errors: {', '.join(document['left'])}; run prune again")
    elif document["going"]:
        done = "freed" if removed else "to be freed; --yes removes"
        lines.append(f"  {size_text(document['bytes'])} {done}")
    else:
        lines.append("  nothing to remove")
    return lines
