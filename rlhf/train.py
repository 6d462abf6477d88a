"""python -m rlhf.train: compose the configuration, check it, and hand over to the supervisor.

The only file that imports Hydra. Nothing heavy is imported before the configuration is known to be right.
"""

import argparse
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from rlhf.algorithms.table import check_algorithm
from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.config.schema import SECTIONS, SETTINGS, did_you_mean, nearest, nearest_setting, setting_of
from rlhf.config.validate import validate
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError

PACKAGE = Path(__file__).resolve().parent
GLOBAL_PACKAGE = "# @package _global_"
HELP = """\
usage: python -m rlhf.train [recipes=NAME] [GROUP=ENTRY ...] [KEY=VALUE ...] [--config-dir DIR] [--cfg job] [--help]

Trains a language model with reinforcement learning. The same command again resumes the run.

  recipes=NAME      a named experiment; recipes=null is none, recipes=[a,b] applies both
  GROUP=ENTRY       one entry of a configuration group
  KEY=VALUE         one setting; wins over groups and recipes
  --config-dir DIR  more entries and recipes: DIR/recipes/NAME.yaml, DIR/GROUP/ENTRY.yaml
  --cfg job         print the resolved configuration (every setting) and exit
  --help            print this page and exit

examples:
  python -m rlhf.train
  python -m rlhf.train trainer.nproc=2 trainer.experiment_name=two_ranks
  python -m rlhf.train recipes=minimal model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_files=train.jsonl
  python -m rlhf.train recipes=gsm8k_qwen_0.5b actor.optim.lr=2e-6 trainer.logger=[wandb]
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. A user's mistake is one message on stderr and `EXIT_USER_ERROR`."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER_ERROR


def _run(argv: list[str]) -> int:
    arguments = _parse(argv)
    library = Library.find(arguments.config_dir)
    if arguments.help:
        sys.stdout.write(help_page(library))
        return EXIT_DONE
    config = compose_config(arguments.overrides, library)
    validate(config)
    check_algorithm(config)
    if arguments.cfg:
        sys.stdout.write(to_yaml(config))
        return EXIT_DONE

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        check_inputs(config)
        from rlhf.worker import main_under_torchrun

        return main_under_torchrun(config)
    from rlhf.launch.supervisor import supervise

    return supervise(config, lambda: check_inputs(config))


def check_inputs(config: Config) -> None:
    """Checks that may import heavy libraries, for after everything that a typo can break; raises UserError."""
    from rlhf.data import check_sources
    from rlhf.reward import check_reward
    from rlhf.tracking import check_trackers

    check_sources(config)
    check_reward(config.reward, config.reward_model)
    check_trackers(config)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help shows the usage)")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--cfg", choices=("job",))
    parser.add_argument("--help", "-h", action="store_true")
    return parser.parse_intermixed_args(argv)


@dataclass(frozen=True)
class Library:
    """Where configuration files lie: the bundled conf/ and the folders that hold further groups and recipes/."""

    conf: Path
    others: tuple[Path, ...]

    @classmethod
    def find(cls, user_dir: Path | None) -> "Library":
        """The bundled folders (inside the package in a wheel, beside it in a checkout), then the user's."""
        root = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
        if user_dir is None:
            return cls(root / "conf", (root,))
        user_dir = user_dir.expanduser().absolute()
        if not user_dir.is_dir():
            raise UserError(f"--config-dir {user_dir}: there is no such folder.")
        return cls(root / "conf", (root, user_dir))

    @property
    def groups(self) -> list[str]:
        return sorted(p.name for p in self.conf.iterdir() if p.is_dir())

    def entries(self, group: str) -> dict[str, Path]:
        """The files of a group (or of `recipes`) by the name that selects them."""
        found: dict[str, Path] = {}
        for folder in (self.conf, *self.others):
            for path in sorted((folder / group).rglob("*.yaml")):
                name = path.relative_to(folder / group).with_suffix("").as_posix()
                if name in found and not path.samefile(found[name]):
                    raise UserError(f"{path}: {group}={name} already means {found[name]}; give this file another name.")
                found.setdefault(name, path)
        return found


def compose_config(overrides: list[str], library: Library) -> Config:
    """Schema, groups, recipe, then the command line, in this order; resolved and typed.

    Raises:
        UserError: for anything wrong on the command line (all of it at once) or in a file.
    """
    choices, values, problems = [], [], []
    for text in overrides:
        try:
            override = _parse_override(text)
            if override.key_or_group in (*library.groups, "recipes"):
                choices.append(_choice(override, library))
            else:
                values += _flatten(override.key_or_group, override.value())
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))

    composed = _compose(choices, library)
    for key, value in values:
        try:
            OmegaConf.update(composed, key, value, merge=False, force_add=True)
        except GrammarParseError as error:
            problems.append(f"{key}={value}: {str(error).splitlines()[0]}.")
        except OmegaConfBaseException:
            setting = setting_of(key)
            assert setting is not None
            problems.append(f"{key}={'null' if value is None else value}: must be {setting.expects}.")
    if problems:
        raise UserError("\n".join(problems))
    return _resolve(composed)


def _parse_override(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        if "=" not in text:
            found = text if setting_of(text) else nearest_setting(text)
            raise UserError(f"{text}: has no value; write {found or 'KEY'}=VALUE.") from error
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{text}: cannot be read ({reason}). Quote a value with special characters: KEY='\"VALUE\"'."
        ) from error
    if override.type is OverrideType.DEL:
        raise UserError(f"{text}: settings cannot be removed; write KEY=null, or recipes=null for no recipe.")
    if override.is_sweep_override():
        raise UserError(f"{text}: one run takes one value; a list is written in brackets, KEY=[a,b].")
    if override.package is not None:
        raise UserError(f"{text}: write GROUP=ENTRY, without @.")
    return override


def _choice(override: Override, library: Library) -> str:
    """The override for Hydra of a group or of `recipes`, once its entry is known to exist."""
    group, value = override.key_or_group, override.value()
    if group == "recipes" and value is None:
        return "~recipes"
    known = library.entries(group)
    if value is None:
        value = "null"
    names = [str(n) for n in value] if group == "recipes" and isinstance(value, list) else [str(value)]
    for name in names:
        if name not in known:
            what = "there is no such recipe" if group == "recipes" else "the group has no such entry"
            raise UserError(f"{group}={name}: {what}.{did_you_mean(nearest(name, known))} Choices: {', '.join(known)}.")
    return f"{group}=[{','.join(names)}]"


def _flatten(key: str, value: Any) -> list[tuple[str, Any]]:
    """The settings that `key=value` changes: one, or those of a section written as {a: 1, b: 2}."""
    if setting_of(key):
        return [(key, value)]
    if key not in SECTIONS:
        near = did_you_mean(nearest_setting(key)) or " `--cfg job` prints all settings."
        raise UserError(f"{key}={value}: there is no setting {key}.{near}")
    if not isinstance(value, dict):
        inside = next(k for k in SETTINGS if k.startswith(key + "."))
        raise UserError(f"{key}={value}: {key} is a section; set what it holds, such as {inside}.")
    return [pair for name, item in value.items() for pair in _flatten(f"{key}.{name}", item)]


def _compose(choices: list[str], library: Library) -> DictConfig:
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("rlhf.package", lambda path: str(PACKAGE / path), replace=True)
    quoted = ",".join("'file://" + str(path).replace("'", "\\'") + "'" for path in library.others)
    try:
        with initialize_config_dir(config_dir=str(library.conf), version_base="1.3"):
            return compose("train", overrides=[*choices, f"hydra.searchpath=[{quoted}]"])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name}:{mark.line + 1}" if mark else " ".join(choices)
        raise UserError(f"{where}: not valid YAML: {error.problem or error.context}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{' '.join(choices)}: not a text file in YAML: {str(error).splitlines()[0]}.") from error
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        where = f"{' '.join(choices)}: the defaults name {group + '=' * bool(group)}{name}, which does not exist."
        known = library.entries(group) if group in (*library.groups, "recipes") else {}
        raise UserError(
            f"{where}{did_you_mean(nearest(name, known))} Choices: {', '.join(known) or 'none'}."
        ) from error
    except HydraException as error:
        raise UserError(_composition_problem(error, choices, library)) from error


def _composition_problem(error: HydraException, choices: list[str], library: Library) -> str:
    """What is wrong in which file, from Hydra's error and the OmegaConf error behind it."""
    cause = error.__cause__ or error.__context__
    named = re.match(r"In '(?:(.*)/)?([^/']+)': ", str(error))
    group, name = named.groups() if named else (None, None)
    path = library.entries(group).get(name) if group and name else None
    where = f"{path or ' '.join(choices)}: "
    key = getattr(cause, "full_key", None) or ""
    reason = str(cause or str(error)[named.end() if named else 0 :]).splitlines()[0]
    if key == "recipes":
        return f"{where}the first line of a recipe must be `{GLOBAL_PACKAGE}`."
    if isinstance(cause, GrammarParseError):
        return f"{where}{key}={cause.value}: {reason}."
    if key and key not in SECTIONS and not setting_of(key):
        return f"{where}there is no setting {key}.{did_you_mean(nearest_setting(key))}"
    if setting := setting_of(key):
        return f"{where}{key}: {reason}; must be {setting.expects}."
    return f"{where}{reason}"


def _resolve(composed: DictConfig) -> Config:
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise UserError(
                "\n".join(f"{key} is not set: add {key}=VALUE to the command or recipe." for key in missing)
            )
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    assert isinstance(config, Config)
    return config


def help_page(library: Library) -> str:
    """Usage, the groups with their entries, and the recipes with the first line of their description."""
    groups = "".join(f"  {group:<14}{', '.join(library.entries(group))}\n" for group in library.groups)
    recipes = library.entries("recipes")
    width = max(map(len, recipes)) + 2
    lines = "".join(f"  {name:<{width}}{_description(path)}\n" for name, path in recipes.items())
    return f"{HELP}\ngroups:\n{groups}\nrecipes:\n{lines}"


def _description(path: Path) -> str:
    comments = (line.lstrip("# ").rstrip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((line for line in comments if not line.startswith("@package")), "")


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # As in worker.py: threads of the process group may still run, and abort a process that ends in order.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
