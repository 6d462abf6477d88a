"""Checks the checkpoint settings, also against other sections."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlhf.config import Config
from rlhf.config.names.hints import list_problems
from rlhf.config.overrides import hydra_value
from rlhf.config.redaction import Redaction
from rlhf.config.rules.without_effect import without_effect
from rlhf.config.schema.checkpoint import CONTENTS, REMOTES
from rlhf.errors import did_you_mean, nearest


def checkpoint_problems(config: Config) -> Iterator[str]:
    saved, loaded = config.checkpoint.contents, config.checkpoint.load_contents
    resumes = config.trainer.resume_mode != "disable"
    yield from list_problems("checkpoint.contents", saved, CONTENTS)
    yield from list_problems("checkpoint.load_contents", loaded or [], CONTENTS)
    # Check this also with trainer.save_freq=0: a stop request makes the run save.
    if not saved:
        yield f"checkpoint.contents=[]: nothing to save; name any of {', '.join(CONTENTS)}."
    elif resumes and not {"model", "hf_model"} & set(saved):
        yield (
            f"checkpoint.contents={saved}: a run cannot resume without model or hf_model; "
            "add model, or set trainer.resume_mode=disable."
        )
    elif lacking := [name for name in ("optimizer", "extra") if config.checkpoint.journal and name not in saved]:
        yield (
            f"checkpoint.contents={saved}: without {' and '.join(lacking)} a resumed run has other weights than the "
            "run that wrote the samples in the journal; add them, or set checkpoint.journal=false."
        )
    yield from _export(config, resumes=resumes)
    yield from _retention(config)
    yield from _remote(config)
    yield from _memory(config)
    if loaded is None:
        return
    if not {"model", "hf_model"} & set(loaded):
        yield f"checkpoint.load_contents={loaded}: needs model or hf_model; add model, or set null."
    if config.trainer.resume_mode != "resume_path":
        # A run loads every part of its own checkpoints.
        mode = config.trainer.resume_mode
        yield from without_effect(config, ["checkpoint.load_contents"], "trainer.resume_mode=resume_path", mode)


def _export(config: Config, *, resumes: bool) -> Iterator[str]:
    saved, dtype = config.checkpoint.contents, config.checkpoint.hf_dtype
    if "hf_model" not in saved:
        remedy = f"checkpoint.contents={hydra_value([*saved, 'hf_model'])}"
        yield from without_effect(config, ["checkpoint.hf_dtype"], "hf_model in checkpoint.contents", remedy=remedy)
    elif dtype in ("bfloat16", "float16") and resumes and "model" not in saved:
        yield (
            f"checkpoint.hf_dtype={dtype}: without model in checkpoint.contents a run would resume from rounded "
            "weights; add model, or set checkpoint.hf_dtype=null or trainer.resume_mode=disable."
        )


def _retention(config: Config) -> Iterator[str]:
    c = config.checkpoint
    for key in ("keep_every", "keep_best"):
        if getattr(c, key) and c.max_to_keep is None:
            yield (
                f"checkpoint.{key}={getattr(c, key)}: has no effect with checkpoint.max_to_keep=null, which keeps all; "
                "set checkpoint.max_to_keep, for example to 1."
            )
    if not c.keep_best:
        return
    if config.trainer.test_freq == 0:
        yield (
            f"checkpoint.keep_best={c.keep_best}: needs evaluations to rank checkpoints; set "
            f"trainer.test_freq={config.trainer.save_freq or 20}."
        )
    if config.data.train_files is not None and config.data.val_files is None:
        yield f"checkpoint.keep_best={c.keep_best}: needs evaluations to rank checkpoints; set data.val_files."


def _memory(config: Config) -> Iterator[str]:
    memory = config.checkpoint.memory
    if not memory.freq:
        keys = ["checkpoint.memory.dir", "checkpoint.memory.replicas"]
        yield from without_effect(config, keys, "checkpoint.memory.freq=1", 0)
    elif not memory.dir.startswith("/"):
        yield f"checkpoint.memory.dir={memory.dir!r}: must be an absolute path, such as /dev/shm."


def _remote(config: Config) -> Iterator[str]:
    remote = config.checkpoint.remote
    if remote is None:
        yield from without_effect(config, ["checkpoint.remote_max_to_keep"], "checkpoint.remote", "null")
        return
    scheme, separator, path = remote.partition("://")
    copies = Path(path, config.trainer.project_name, config.trainer.experiment_name)
    if (shown := Redaction()(address := remote.partition("?")[0])) != address:
        yield (
            f"checkpoint.remote={shown}: contains a secret, which would be stored in every checkpoint and in "
            "resolved.yaml. Remove it, and put it where the store's own tools read it: in the environment or in a "
            "file of your home directory."
        )
    elif not separator or scheme not in REMOTES:
        near = did_you_mean(nearest(scheme, tuple(REMOTES)))
        yield f"checkpoint.remote={remote}: must begin with {', '.join(f'{known}://' for known in REMOTES)}.{near}"
    elif not path.strip("/") or (scheme == "file" and not path.startswith("/")):
        example = {"file": "/folder", "hdfs": "namenode:8020/folder"}.get(scheme, "bucket/folder")
        yield f"checkpoint.remote={remote}: must name a whole path, such as {scheme}://{example}."
    elif scheme == "file" and copies.resolve().is_relative_to(config.run_dir.resolve()):
        yield (
            f"checkpoint.remote={remote}: the copies would be inside the run directory, {config.run_dir}; set another "
            "folder."
        )
    elif find_spec(package := REMOTES[scheme]) is None:
        yield f"checkpoint.remote={remote}: needs the package {package}; run `pip install {package}`."
