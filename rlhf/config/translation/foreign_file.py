"""Reads the settings in a file of another trainer: YAML, JSON, or a shell script with a command."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhf.config.stored import parse_yaml
from rlhf.config.translation.interpolations import Interpolations
from rlhf.config.translation.shell_script import commands_of
from rlhf.config.translation.shell_words import UNKNOWN
from rlhf.errors import UserError, nearby

_REPLACE = "Replace it in the file, and translate again."
TRAINERS = ("verl", "trl", "openrlhf")
_SIGNS = {
    "verl": ("actor_rollout_ref.", "trainer.n_gpus_per_node"),
    "openrlhf": (
        "actor.model_name_or_path",
        "algo.",
        "pretrain",
        "prompt_data",
        "data.prompt_dataset",
        "rollout_batch_size",
        "advantage_estimator",
    ),
    "trl": ("num_generations", "max_completion_length", "per_device_train_batch_size", "reward_funcs", "loss_type"),
}
"""Maps each trainer to names, or prefixes of names, that only this trainer's configurations have."""

_INSTALLERS = ("pip", "venv", "ensurepip")
_LAUNCHERS = (
    "torchrun",
    "deepspeed",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
)
_LAUNCHERS_NAMES = {
    "nnodes": "num_machines",
    "num_nodes": "num_machines",
    "num_gpus": "nproc_per_node",
}
"""Maps option names of torchrun and deepspeed to accelerate's `num_machines` or torchrun's `nproc_per_node`."""
_FLAGS = ("__multi_gpu", "__standalone", "__use_deepspeed", "__use_fsdp")
"""Options of launchers without a value, with underscores for dashes."""
_OF_ONE_START = (
    "main_process_ip",
    "main_process_port",
    "machine_rank",
    "master_addr",
    "master_port",
    "node_rank",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "standalone",
)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a file by their dotted names, without verl's `+` and TRL's `--`.

    Raises:
        UserError: the file is missing or not text, has no settings, or has a value that no setting can have.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file.{nearby(path, Path.is_file)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not a text file ({error}). Give a YAML, JSON or shell file.") from error
    if path.suffix == ".py":
        raise UserError(f"{path}: is a Python script. Write its arguments into a YAML file: one line NAME: VALUE each.")
    if path.suffix in (".yaml", ".yml", ".json"):
        found = _of_yaml(path, text)
    else:
        found = _of_script(path, text)
    if not found:
        raise UserError(
            f"{path}: has no settings. Give verl's YAML or script (KEY=VALUE), or the YAML or script of TRL or "
            "OpenRLHF (--name VALUE)."
        )
    for name, value in found.items():
        try:
            str(value)
        except ValueError as error:
            raise UserError(f"{path}: {name} has a number with too many digits. {_REPLACE}") from error
    return found


def trainer_of(path: Path, names: Mapping[str, Any]) -> str:
    """Return the trainer whose names the file has. Raise UserError if no trainer's names are among them."""
    for trainer, signs in _SIGNS.items():
        if any(name.startswith(sign) if sign.endswith(".") else name == sign for name in names for sign in signs):
            return trainer
    raise UserError(
        f"{path}: has no name that only verl, TRL or OpenRLHF has; name the trainer with --trainer "
        f"{{{','.join(TRAINERS)}}}."
    )


def of_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings among the words of a command: `key=value`, `--name value`, `--name=value` and `--flag`."""
    found: dict[str, Any] = {}
    name: str | None = None
    values: list[str] = []
    for word in [*words, "--"]:
        option = word.startswith("--")
        override = not option and not word.startswith("-") and "=" in word and not word.startswith("http")
        if (option or override) and name is not None:
            found[name] = True if not values else _typed(values[0]) if len(values) == 1 else [*map(_typed, values)]
            name, values = None, []
        if option and word != "--":
            name, _, value = word[2:].partition("=")
            values = [value] if value else []
            name = name if "." in name else name.replace("-", "_")
        elif override:
            key, _, value = word.partition("=")
            found[key.lstrip("+~")] = _typed(value)
        elif name is not None:
            values.append(word)
    return found


def _of_script(path: Path, text: str) -> dict[str, Any]:
    """Return the settings of the one command that runs Python with arguments; without such a command, of all commands.

    Raises:
        UserError: two commands run Python with arguments (the union of their settings would fit neither), a value is
            not known without running the script, or the script cannot be read.
    """
    try:
        commands = commands_of(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    found = [(command, settings) for command in commands if (settings := _of_command(command))]
    if len(found) > 1:
        first, second = (_beginning(command) for command, _ in found[:2])
        raise UserError(
            f"{path}: has two commands with settings, `{first}` and `{second}`. Keep one of them in the file."
        )
    if not found:
        words = [word for command in commands for word in (*command, "--")]
        found = [(words, of_arguments(words))]
    [(command, settings)] = found
    if (word := _not_known(command, settings)) is None:
        return settings
    if array := re.search(r"\$\{\w+\[[@*]\]\}", word):
        raise UserError(
            f"{path}: {array[0]} is a shell array, which translate does not expand. Write its words into the command."
        )
    raise UserError(
        f"{path}: the value of {word} is not known without running the script. Write what it stands for into the "
        "command."
    )


def _not_known(command: Sequence[str], settings: Mapping[str, Any]) -> str | None:
    """Return the first setting, or word after the script or module, whose value or number of words only the shell
    knows, or None."""
    words = [*itertools.dropwhile(lambda word: word not in ("-m", "grpo") and not word.endswith(".py"), command)][1:]
    for name, value in settings.items():
        words += [f"{name}={each}" for each in (value if isinstance(value, list) else [value])]
    for before, word in zip(["", *words], words, strict=False):
        if UNKNOWN in word or re.search(r"\$\{(?!oc\.env:)", word):
            return word.replace(UNKNOWN, "")
        whole = re.fullmatch(r"\$\{oc\.env:(\w+)\}", word)
        if whole and not (before.startswith("--") and "=" not in before):
            return f"${whole[1]}"
    return None


def _beginning(command: Sequence[str]) -> str:
    """Return the first characters of a command, without the variables before it, which may be secrets."""
    text = " ".join(itertools.dropwhile(re.compile(r"env$|\w+=").match, command))
    return text if len(text) <= 60 else f"{text[:60]}..."


def _of_command(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments after the Python file, the module or `trl grpo` in a command, and the launcher's arguments.

    Launchers are accelerate, torchrun and deepspeed. The numbers of their processes and machines get accelerate's
    names: `num_processes` and `num_machines`. Other arguments before the file are ignored.
    """
    first = 0  # index of the first word after the last launcher
    for number, (before, word) in enumerate(zip(["", *words], words, strict=False), 1):
        if word in _LAUNCHERS or (before == "accelerate" and word == "launch"):
            first = number
        elif before == "-m" and word in _INSTALLERS:
            return {}
        elif before == "-m" or (before, word) == ("trl", "grpo") or (word.endswith(".py") and not _takes_value(before)):
            own = words[first : number - 1 - (before == "-m")] if first else ()
            return _of_launcher(of_arguments(own)) | of_arguments(words[number:])
    return {}


def _takes_value(word: str) -> bool:
    """Return whether the next word is the value of the option `word`, such as `--config`."""
    return word.startswith("-") and "=" not in word and word.replace("-", "_") not in _FLAGS


def _of_launcher(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launcher's arguments by accelerate's names, without addresses and ports, which belong to one start."""
    named = {_LAUNCHERS_NAMES.get(name.replace("-", "_"), name): value for name, value in found.items()}
    ranks, machines = named.pop("nproc_per_node", None), named.get("num_machines")
    if isinstance(ranks, int):
        named["num_processes"] = ranks * (machines if isinstance(machines, int) else 1)
    elif ranks is not None:
        named["nproc_per_node"] = ranks
    return {name: value for name, value in named.items() if name not in _OF_ONE_START}


def _typed(text: str) -> Any:
    """Return the number, boolean, list or string that `text` means in YAML or Python."""
    if text == "None":
        return None
    if re.search(r"\s#", text):  # a comment in YAML alone
        return text
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        return _number(value)
    return text if value is not None and not isinstance(value, bool | int | float | list | dict) else value


def _number(text: str) -> Any:
    """Return the number that `text` means in Python, such as 1e-6, which YAML reads as a string; else `text`."""
    return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else text


def _of_yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: not valid YAML: {reason}. Correct it; write out values instead of aliases."
        ) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must have settings at the top, such as `model_name_or_path: NAME`.")
    try:
        return dict(_flat(tree, Interpolations(tree), ()))
    except RecursionError as error:
        raise UserError(f"{path}: its settings are nested too deeply, or its interpolations are. {_REPLACE}") from error


def _flat(tree: Mapping[Any, Any], interpolations: Interpolations, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        place = (*above, str(key))
        if isinstance(value, dict) and value:
            yield from _flat(value, interpolations, place)
            continue
        value = interpolations.resolve(value, place)
        yield ".".join(place), None if value == "???" else _number(value) if isinstance(value, str) else value
