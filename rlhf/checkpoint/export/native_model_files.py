"""Finds the config, tokenizer and chat template of a native checkpoint, there or in the run's initial model."""

from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.config.stored import stored_sections
from rlhf.errors import UserError
from rlhf.models.fingerprint import fingerprint
from rlhf.models.hf.small_files import is_small_file, read_small_files, with_chat_template
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import make_dir, write_small
from rlhf.storage.hf_layout import MODEL_CONFIG
from rlhf.storage.layout import CONFIG, HF_FOLDER
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.scratch import Scratch

REMEDY = "Name a folder with the model's config and tokenizer: --hf_model_path."


class NativeModelFiles:
    """Creates a folder with a role's config, tokenizer and chat template, valid until `close`.

    A checkpoint with `hf_model` has these files. Otherwise they are read from `model.path` of its configuration (a
    critic's from `critic.path`), which must have the same fingerprint as at the run's start.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest, files: CheckedFiles, role: str) -> None:
        self._scratch = Scratch()
        self.folder = self._scratch.folder
        try:
            own = "actor" if role == "ref" else role
            if f"{own}/{HF_FOLDER}/{MODEL_CONFIG}" in manifest.files:
                contents = _of_checkpoint(files, manifest, f"{own}/{HF_FOLDER}")
            else:
                contents = _of_start(checkpoint, manifest, files, own)
            for name, content in contents.items():
                make_dir((self.folder / name).parent)
                write_small(self.folder / name, content)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._scratch.close()


def _of_checkpoint(files: CheckedFiles, manifest: Manifest, folder: str) -> dict[str, bytes]:
    names = {name.removeprefix(f"{folder}/"): name for name in manifest.in_folder(folder)}
    return {short: files.content(name) for short, name in names.items() if is_small_file(short)}


def _of_start(checkpoint: Path, manifest: Manifest, files: CheckedFiles, role: str) -> dict[str, bytes]:
    model, setting, path, revision = _start(checkpoint, manifest, files, role)
    template = model["chat_template"] if setting == "model.path" else None
    folder = _resolve(checkpoint, setting, path, revision)
    _check_start(checkpoint, manifest, setting, path, folder)
    contents = read_small_files(folder)
    if template is not None:
        if not (text := Path(template).expanduser()).is_file():
            raise UserError(f"model.chat_template={template} of {checkpoint} does not exist any more. {REMEDY}")
        contents = with_chat_template(contents, text.read_bytes())
    return contents


def start_settings(checkpoint: Path, manifest: Manifest, files: CheckedFiles) -> Any:
    """Return the section `model` of a checkpoint's configuration. Raise UserError if it is missing or damaged."""
    return _start(checkpoint, manifest, files, "actor")[0]


def base_folder(checkpoint: Path, manifest: Manifest, files: CheckedFiles, given: Path | None) -> Path:
    """Return the folder with the base model of a checkpoint's adapters: `given`, or `model.path` of its configuration.
    Raises UserError when the folder is gone or has another model."""
    _, setting, path, revision = _start(checkpoint, manifest, files, "actor")
    folder = given or _resolve(checkpoint, setting, path, revision, weights=True)
    _check_start(checkpoint, manifest, setting, str(folder) if given else path, folder)
    return folder


def _start(checkpoint: Path, manifest: Manifest, files: CheckedFiles, role: str) -> tuple[Any, str, str, str | None]:
    """Return the configuration's section `model`, and setting, path and revision of the role's initial model."""
    try:
        config: Any = stored_sections(files.content(CONFIG), manifest.release)
        model = config["model"]
        setting, path, revision = "model.path", model["path"], model["revision"]
        if role == "critic" and config["critic"]["path"] is not None:
            setting, path, revision = "critic.path", config["critic"]["path"], None
        model["chat_template"]
    except (ValueError, KeyError, TypeError, DamagedCheckpoint) as error:
        raise UserError(f"{checkpoint / CONFIG} does not name its model ({error}). {REMEDY}") from None
    return model, setting, str(path), revision


def _check_start(checkpoint: Path, manifest: Manifest, setting: str, path: str, folder: Path) -> None:
    known = manifest.fingerprints.get(setting)
    if known is not None and any(folder.glob("*.safetensors")) and fingerprint(folder) != known:
        raise UserError(f"{setting}={path} is no longer what {checkpoint} was trained from. {REMEDY}")


def _resolve(checkpoint: Path, setting: str, path: str, revision: str | None, *, weights: bool = False) -> Path:
    """Return the folder that a checkpoint's setting names; a Hub name is downloaded, with the weights if `weights`."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    from rlhf.models.loading import ModelSource, resolve_path  # imports transformers, which only a Hub name needs

    try:
        return resolve_path(ModelSource(setting, path, revision), weights=weights)
    except UserError as error:
        raise UserError(
            f"{checkpoint} was trained from {setting}={path}, which cannot be loaded: {error} {REMEDY}"
        ) from None
