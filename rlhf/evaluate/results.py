"""Stores the result of each evaluation, compares a stored result with the command, and shows all results."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit.user_files import user_files
from rlhf.config import Config
from rlhf.config.compare import OF_EVALUATIONS, SECRETS, as_lines, compare_text, not_compared
from rlhf.config.derived import needs_reward_model
from rlhf.config.resolved import to_yaml
from rlhf.config.user_functions import CUSTOM_CLS, hash_of_files
from rlhf.data.records import resolve
from rlhf.errors import UserError
from rlhf.evaluate.target_settings import PlannedEvaluation
from rlhf.models.fingerprint import code_fingerprint, fingerprint, fingerprint_file
from rlhf.printable import text_table
from rlhf.storage.files import replace_durably
from rlhf.storage.layout import HISTORY
from rlhf.tracking.history import History
from rlhf.tracking.source_results import source_results

log = logging.getLogger(__name__)
RESULT = "evaluation.json"
AFFECTING = (
    "trainer.seed",
    "trainer.tf32",
    "backend.autocast",
    "model.",
    "data.",
    "rollout.",
    "env.",
    "reward.",
    "reward_model.",
)
HARMLESS = ("data.train_", "data.shuffle", "data.gen_batch_size", "model.path", "model.enable_gradient_checkpointing")
"""Results depend on settings with a prefix in AFFECTING but not in HARMLESS, and on the files of `files_of`."""


def files_of(planned: PlannedEvaluation) -> dict[str, str]:
    """Return the hashes of the local files on which the result depends, and the names of Hub models.

    Raise UserError if a file cannot be read.
    """
    try:
        return _files_of(planned)
    except OSError as error:
        raise UserError(
            f"{planned.target.name}: {error.filename} cannot be read ({error.strerror}). Restore the file, or set "
            "another file in the command."
        ) from None


def _files_of(planned: PlannedEvaluation) -> dict[str, str]:
    config, target = planned.config, planned.target
    hashes = {"target": target.fingerprint}
    hashes |= user_files(config.reward, config.algorithm, config.actor, config.model, config.env)
    if (names := config.data.val_files) is not None:
        found = resolve("data.val_files", names, "test", any_file=True)
        hashes |= {f"data.val_files {source.spec}": fingerprint_file(source.path) for source in found if source.path}
    if (spec := config.data.custom_cls.spec) is not None:
        hashes[CUSTOM_CLS] = hash_of_files([spec])
    if target.folder is None:
        hashes["model.revision"] = str(config.model.revision)
    if target.checkpoint is None and config.model.lora.enabled and (adapter := config.model.lora.path) is not None:
        hashes["model.lora.path"] = _hash_of_model(adapter)
    if config.model.trust_remote_code and target.model is not None and (code := _hash_of_code(target.model)):
        hashes["model.trust_remote_code"] = code
    if needs_reward_model(config.reward) and (judge := config.reward_model.path) is not None:
        hashes["reward_model.path"] = _hash_of_model(judge, config.reward_model.revision)
    return hashes


def check_same(planned: PlannedEvaluation, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise UserError if a hash of `files_of` at the start of the command (`before`) differs from the hash in `now`."""
    if changed := sorted(key for key, value in before.items() if now.get(key) != value):
        raise UserError(
            f"{', '.join(changed)}: the file changed during the command, so {planned.target.name} has no result. Run "
            "the command again, with trainer.overwrite=true if earlier targets must use the new file, too."
        )


def _hash_of_model(name: str, revision: str | None = None) -> str:
    """Return the fingerprint of a folder, or the name and revision of a Hub model."""
    folder = Path(name).expanduser()
    return fingerprint(folder) if folder.is_dir() else f"{name}@{revision}"


def _hash_of_code(name: str) -> str:
    folder = Path(name).expanduser()
    return code_fingerprint(folder) if folder.is_dir() else ""


def stored_result(planned: PlannedEvaluation) -> dict[str, Any] | None:
    """Return the stored result of this evaluation, or None if there is none.

    Raises:
        UserError: the stored result is damaged, or its settings or files differ from this command's.
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
            "Set trainer.experiment_name=NAME to store a second result, or trainer.overwrite=true to replace this one."
        )
    if secrets := [name for name in not_compared(planned.config) if name.startswith(AFFECTING)]:
        log.warning(f"The stored result of %s is shown. {SECRETS}", planned.target.name, ", ".join(secrets))
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
    """Return a table with a row for each target: step, accuracy, reward, and mean@k, pass@k, maj@k of each source.

    A metric that a result lacks is `-`.
    """
    rows = source_results([result["metrics"] for result in results])
    columns = list(dict.fromkeys(key for row in rows for key in row))
    several = len({source for source, _ in columns}) > 1
    cells = [["target", "step", "accuracy", "reward", *(" ".join(key) if several else key[1] for key in columns)]]
    for result, row in zip(results, rows, strict=True):
        metrics = result["metrics"]
        formats = {"val/accuracy": ".1%", "val/reward": ".3f"}
        known = [format(metrics[name], form) if name in metrics else "-" for name, form in formats.items()]
        values = [f"{row[key]:.3f}" if key in row else "-" for key in columns]
        cells.append([str(result["target"]), str(result["step"]), *known, *values])
    return text_table(cells)
