"""Finds the policies to evaluate: models in Hugging Face format, runs, and checkpoints of runs. Imports no torch."""

import re
from dataclasses import dataclass
from pathlib import Path

import xxhash
import yaml
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rlhf.checkpoint.commit.manifest import Manifest, read_manifest
from rlhf.config.resolved import stored_tree
from rlhf.config.rules.path_rules import model_folder_problems
from rlhf.errors import UserError
from rlhf.models.fingerprint import fingerprint, fingerprint_file
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hf_layout import ADAPTER_CONFIG, MODEL_CONFIG
from rlhf.storage.layout import CONFIG, HF_FOLDER, MANIFEST, POINTER, RUN_FILE, scan, step_of
from rlhf.storage.reading import CheckedFiles

UNUSED = ("tracking", "checkpoint", "guards")
"""Sections of a run's settings that an evaluation ignores, as they may name secrets or missing folders."""


@dataclass(frozen=True, eq=False)
class EvaluationTarget:
    """A policy to evaluate, as the user named it. `checkpoint` is None for a model in Hugging Face format."""

    name: str
    checkpoint: Path | None = None
    manifest: Manifest | None = None

    @property
    def step(self) -> int:
        return 0 if self.manifest is None else self.manifest.step

    @property
    def folder(self) -> Path | None:
        """The folder of the checkpoint or model; None for a Hub name."""
        path = self.checkpoint or Path(self.name).expanduser()
        return path.absolute() if path.is_dir() else None

    @property
    def slug(self) -> str:
        """Name of the folder for the results, different for each policy."""
        if self.folder is None:
            return re.sub(r"[^\w.-]", "_", self.name)
        names = (self.folder.parent.name, self.folder.name) if self.checkpoint else (self.folder.name,)
        return f"{'-'.join(names)}-{xxhash.xxh3_64_hexdigest(str(self.folder.resolve()).encode())[:8]}"

    @property
    def fingerprint(self) -> str:
        """A hash of the checkpoint's manifest or of the model's files; for a Hub model its name."""
        if self.checkpoint is not None:
            return fingerprint_file(self.checkpoint / MANIFEST)
        return self.name if self.folder is None else fingerprint(self.folder)

    @property
    def model(self) -> str | None:
        """The value of `model.path`; None if the stored configuration names the model."""
        if self.manifest is None:
            return self.name
        assert self.checkpoint is not None
        return str(self.checkpoint / "actor" / HF_FOLDER) if self.manifest.imported else None

    def stored_settings(self) -> DictConfig | None:
        """Return the configuration of the checkpoint's run; None without a run. Raise UserError if unreadable."""
        if self.checkpoint is None or self.manifest is None or self.manifest.imported:
            return None
        try:
            content = CheckedFiles(self.checkpoint, self.manifest.files).content(CONFIG).decode()
            tree = stored_tree(content, self.manifest.release, without=UNUSED)
        except (DamagedCheckpoint, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{self.name}: its configuration cannot be read ({reason}). Name another target.") from None
        return tree


def find_target(name: str) -> EvaluationTarget:
    """Return the policy that `name` names. Raise UserError if there is no such policy, or its checkpoint is damaged."""
    if "://" in name:
        raise UserError(f"{name} is a URL. Download the checkpoint, and give the local folder.")
    path = Path(name).expanduser()
    is_checkpoint = path.is_dir() and (step_of(path.absolute()) is not None or (path / MANIFEST).is_file())
    for checkpoint in [path] if is_checkpoint else scan(path)[:1]:
        try:
            return EvaluationTarget(name, checkpoint.absolute(), read_manifest(checkpoint))
        except DamagedCheckpoint as error:
            raise UserError(f"{name}: {error}. Name another checkpoint (global_step_N).") from None
    if (path / ADAPTER_CONFIG).is_file() and not (path / MODEL_CONFIG).is_file():
        raise UserError(
            f"{name} is a LoRA adapter without its base model. Name the base model as target, and add "
            f"model.lora.enabled=true model.lora.path={name}."
        )
    if (path / POINTER).is_file() or (path / RUN_FILE).is_file():
        raise UserError(f"{name} has no checkpoint (global_step_N). Name a run that has saved one.")
    if lines := list(model_folder_problems("target", name, True)):
        line = lines[0].removeprefix("target=")
        raise UserError(f"{line} A target is a model in Hugging Face format, a run directory, or a checkpoint.")
    return EvaluationTarget(name)
