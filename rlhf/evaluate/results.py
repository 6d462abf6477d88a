"""Stores the result of each evaluation, compares a stored result with the command, and shows all results."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.assemble.trajectory_hash import user_files
from rlhf.config import Config
from rlhf.config.compare import as_lines, compare_text
from rlhf.config.resolved import to_yaml
from rlhf.config.user_functions import CUSTOM_CLS, hash_of_files
from rlhf.data.records import resolve
from rlhf.errors import UserError
from rlhf.evaluate.target_settings import PlannedEvaluation
from rlhf.models.fingerprint import fingerprint_file
from rlhf.storage.files import replace_durably
from rlhf.storage.layout import HISTORY
from rlhf.tracking.history import History

RESULT = "evaluation.json"
AFFECTING = ("trainer.seed", "model.", "data.", "rollout.", "reward.", "reward_model.")
HARMLESS = ("data.train_", "data.shuffle", "data.gen_batch_size", "model.path", "model.enable_gradient_checkpointing")
"""Prefixes of the settings on which results depend, and of exceptions. The target's fingerprint covers the model."""
OF_EVALUATIONS = ("data.val_files", "data.val_max_samples", "rollout.val_kwargs.")
"""Prefixes of settings that a training run does not depend on, but an evaluation does."""
_SHOWN = re.compile(r"val-(?:core|aux)/(.+)/(acc|reward)/((?:mean|pass|maj)@\d+)(?:/mean)?")


def files_of(planned: PlannedEvaluation) -> dict[str, str]:
    """Return the hashes of the local files on which the result depends."""
    config, target = planned.config, planned.target
    hashes = {"target": target.fingerprint}
    hashes |= user_files(config.reward, config.algorithm, config.actor, config.model)
    if (names := config.data.val_files) is not None:
        found = resolve("data.val_files", names, "test", any_file=True)
        hashes |= {f"data.val_files {source.spec}": fingerprint_file(source.path) for source in found if source.path}
    if (spec := config.data.custom_cls.spec) is not None:
        hashes[CUSTOM_CLS] = hash_of_files([spec])
    return hashes


def stored_result(planned: PlannedEvaluation) -> dict[str, Any] | None:
    """Return the stored result of this evaluation, or None without one.

    Raises:
        UserError: the stored result has other settings or files.
    """
    path = planned.config.run_dir / RESULT
    if planned.again or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        changes, files = _changes(found["config"], planned.config), found["files"]
        result: dict[str, Any] = found["result"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}). Remove the file.") from None
    present = files_of(planned)
    others = sorted(key for key in files.keys() | present.keys() if files.get(key) != present.get(key))
    lines = [changes] if changes else []
    lines += [f"  {key}: other content than before" for key in others]
    if lines:
        raise UserError(
            f"{path} has the result of {planned.target.name} with other settings or files:\n" + "\n".join(lines) + "\n"
            "Set trainer.experiment_name=NAME for results of their own, or trainer.overwrite=true to replace this one."
        )
    return result


def _changes(stored: str, config: Config) -> str:
    diff = compare_text(stored, config)
    affecting = [c for c in diff.trajectory if c.key.startswith(AFFECTING) and not c.key.startswith(HARMLESS)]
    affecting += [change for change in diff.harmless if change.key.startswith(OF_EVALUATIONS)]
    return as_lines(affecting).replace(" in the checkpoint,", " before,")


def store_result(planned: PlannedEvaluation, files: Mapping[str, str]) -> dict[str, Any]:
    """Write the result of a finished evaluation durably, and return it."""
    config, target = planned.config, planned.target
    *_, record = History(config.run_dir / HISTORY).records()
    result = {
        "target": target.name,
        "checkpoint": None if target.checkpoint is None else str(target.checkpoint),
        "step": target.step,
        "folder": str(config.run_dir),
        "metrics": {name: value for name, value in record.items() if name != "step"},
    }
    document = {"result": result, "files": dict(files), "config": to_yaml(config)}
    replace_durably(config.run_dir / RESULT, json.dumps(document, indent=1) + "\n")
    return result


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each target: step, accuracy, reward, and mean@k, pass@k, maj@k of each source."""
    rows = [dict(_columns(result["metrics"])) for result in results]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [["target", "step", *columns]]
    cells += [
        [str(result["target"]), str(result["step"]), *(row.get(name, "-") for name in columns)]
        for result, row in zip(results, rows, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    first = [f"{row[0]:<{widths[0]}}" for row in cells]
    return "\n".join(start + line[widths[0] :] for start, line in zip(first, lines, strict=True))


def _columns(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each metric in the table."""
    yield "accuracy", f"{metrics['val/accuracy']:.1%}"
    yield "reward", f"{metrics['val/reward']:.3f}"
    found = [(match.groups(), value) for name, value in metrics.items() if (match := _SHOWN.fullmatch(name))]
    with_accuracy = {source for (source, variable, _), _ in found if variable == "acc"}
    sources = {source for (source, _, _), _ in found}
    for (source, variable, metric), value in sorted(found, key=lambda item: _order(*item[0])):
        if (variable == "acc") == (source in with_accuracy):
            yield f"{source} {metric}" if len(sources) > 1 else metric, f"{value:.3f}"


def _order(source: str, variable: str, metric: str) -> tuple[str, int, int]:
    kind, _, k = metric.partition("@")
    return source, ("mean", "pass", "maj").index(kind), int(k)
