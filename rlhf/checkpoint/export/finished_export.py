"""Exports a finished run for other tools, when a later command adds `hf_model` to checkpoint.contents."""

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from rlhf.checkpoint.commit.manifest import Manifest, manifest_bytes, read_manifest
from rlhf.checkpoint.commit.output_folder import output_folder, verify_written
from rlhf.checkpoint.export.hf_work import hf_work
from rlhf.checkpoint.export.layout_native import open_source
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.stored import stored_sections
from rlhf.models.hf.hf_plan import HfOptions
from rlhf.models.hf.source import Origin
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_json
from rlhf.storage.layout import CONFIG, HF_FOLDER, step_dir
from rlhf.storage.reading import CheckedFiles, parse_json, read_regular

log = logging.getLogger(__name__)
SOURCE = "checkpoint.json"
"""File beside the exported models that names their checkpoint."""
LARGEST_SOURCE = 1 << 16


def export_finished(run_dir: Path, settings: CheckpointConfig, step: int) -> None:
    """Export a run that finished at `step` to `run_dir/huggingface/ROLE` if `settings` ask for it, and log the folder.

    Do nothing if the checkpoint or the folder has this export already. Replace exports of another checkpoint or dtype.
    If other nodes' disks have files of the checkpoint, export nothing and log how to merge the parts.
    Raise UserError if the model's config or tokenizer does not exist any more.
    """
    if "hf_model" not in settings.contents:
        return
    checkpoint, target = step_dir(run_dir, step), run_dir / HF_FOLDER
    manifest, origin = read_manifest(checkpoint), _origin(checkpoint, settings)
    if _has_export(checkpoint, manifest, settings, target):
        return
    if missing := [name for name in manifest.files if not (checkpoint / name).exists()]:
        log.warning(
            "checkpoint.contents=%s: no model is exported, because %s and other files are on other nodes' disks. Copy "
            "each node's part of %s to one machine and run "
            "python -m rlhf.checkpoint merge --local_dir PARTS... --target_dir TARGET",
            settings.contents,
            missing[0],
            checkpoint.name,
        )
        return
    with output_folder(target, overwrite=True, sources=[checkpoint]) as folder:
        for role in manifest.roles:
            _write_role(checkpoint, role, settings, folder)
        verify_written(folder, [write_json(folder, SOURCE, origin)])
    log.info("The model for other tools, as of %s, was written to %s.", checkpoint.name, target)


def explain_no_export(run_dir: Path, settings: CheckpointConfig, step: int) -> None:
    """For a run in a read-only directory, log the folder of the export that `settings` request, or how to export."""
    if "hf_model" not in settings.contents:
        return
    checkpoint, target = step_dir(run_dir, step), run_dir / HF_FOLDER
    if not _has_export(checkpoint, read_manifest(checkpoint), settings, target):
        log.warning(
            "checkpoint.contents=%s: no model can be written to %s. Export it to another folder: python -m "
            "rlhf.checkpoint export %s TARGET",
            settings.contents,
            run_dir / HF_FOLDER,
            run_dir,
        )


def _has_export(checkpoint: Path, manifest: Manifest, settings: CheckpointConfig, target: Path) -> bool:
    """Return whether the checkpoint itself or `target` has the export, and log the folder."""
    folder = None
    if "hf_model" in manifest.contents and _form(asdict(settings)) == _form(_stored(checkpoint, manifest)):
        folder = checkpoint / manifest.roles[0] / HF_FOLDER
    elif _read_origin(target) == _origin(checkpoint, settings):
        folder = target
    if folder is not None:
        log.info("The model for other tools is in %s.", folder)
    return folder is not None


def _origin(checkpoint: Path, settings: CheckpointConfig) -> dict[str, Any]:
    mark = xxhash.xxh3_128_hexdigest(manifest_bytes(checkpoint))
    return {"checkpoint": checkpoint.name, "manifest": mark, "form": _form(asdict(settings))}


def _form(settings: Mapping[str, Any]) -> list[str]:
    """Return an export's dtype (default: float32, as in training) and adapter setting from the section `checkpoint`."""
    return [settings.get("hf_dtype") or "float32", settings.get("hf_adapter") or "keep"]


def _stored(checkpoint: Path, manifest: Manifest) -> Mapping[str, Any]:
    return stored_sections(CheckedFiles(checkpoint, manifest.files).content(CONFIG), manifest.release)["checkpoint"]


def _read_origin(target: Path) -> Any:
    try:
        return parse_json(read_regular(target / SOURCE, LARGEST_SOURCE), SOURCE)
    except (OSError, DamagedCheckpoint):
        return None


def _write_role(checkpoint: Path, role: str, settings: CheckpointConfig, folder: Path) -> None:
    options = HfOptions(dtype=settings.hf_dtype, compared=False, value_model=role == "critic")
    with closing(open_source(Origin(checkpoint, role=role, adapter=settings.hf_adapter))) as source:
        hf_work(source, checkpoint, options).write(folder / role)
