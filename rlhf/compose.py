"""Composes a configuration with Hydra, which only this file and config_folder.py import."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException, ValidationError

from rlhf.config import Config
from rlhf.config.config_folder import ConfigFolder
from rlhf.config.derived import staleness_bound
from rlhf.config.file_problems import composition_problem
from rlhf.config.help_texts import commented_yaml
from rlhf.config.known_settings import SECTIONS, SETTINGS, setting_of
from rlhf.config.library import PACKAGE, Library
from rlhf.config.names.hints import entry_hint, hint, nearest_setting, path_override, recipe_hint, syntax_hint
from rlhf.config.resolved import to_config
from rlhf.config.rules.algorithm_rules import idle_critic
from rlhf.config.rules.env_rules import idle_env
from rlhf.config.rules.lora_rules import idle_lora
from rlhf.errors import UserError
from rlhf.planning.device_defaults import Machine, device_defaults


@dataclass(frozen=True)
class Composition:
    """A configuration before interpolations are resolved. Settings may be missing (`???`)."""

    tree: DictConfig
    typed: list[tuple[str, Any]]
    """Settings of the command line, with their values."""

    @property
    def missing(self) -> str:
        missing = sorted(OmegaConf.missing_keys(self.tree))
        return "\n".join(f"{key} is not set: add {key}=VALUE to the command or recipe." for key in missing)

    def resolved(self) -> Config:
        """Return the configuration with every value resolved.

        Raises:
            UserError: a setting is missing, an interpolation has no target, or a setting of the command line has no
                effect.
        """
        with _interpolating():
            if self.missing:
                raise UserError(self.missing)
            config = to_config(self.tree)
        idle = (idle_critic, idle_lora, idle_env)
        if problems := [problem for check in idle for problem in check(config, self.typed)]:
            raise UserError("\n".join(problems))
        return config

    def commented_yaml(self) -> str:
        """Return every setting with its help text, resolved unless missing.

        Raises:
            UserError: an interpolation has no target.
        """
        with _interpolating():
            plain = OmegaConf.to_container(self.tree, resolve=True)
        return commented_yaml(cast(dict[str, Any], plain))


def compose_config(overrides: list[str], library: Library, machine: Machine | None = None) -> Config:
    """Return the configuration. Groups override the schema, a recipe the groups, and the command line the recipe.

    Args:
        machine: the machine for device defaults; None is this machine.

    Raises:
        UserError: for all mistakes on the command line at once, a mistake in a file, or missing settings.
    """
    return composition(overrides, library, machine).resolved()


def composition(
    overrides: list[str], library: Library, machine: Machine | None = None, stored: DictConfig | None = None
) -> Composition:
    """Return the configuration before it is resolved. See `compose_config`.

    A `stored` configuration replaces the schema's defaults, the default entries of the groups and the default recipe.
    """
    choices, values, earlier = _sorted_overrides(overrides, library)
    ConfigFolder.set_by_files.clear()
    ConfigFolder.required_by_files.clear()
    composed = _compose(choices, library, stored)
    chosen = {group: name.strip("[]") for group, _, name in (choice.partition("=") for choice in choices)}
    for key in ConfigFolder.required_by_files - ConfigFolder.set_by_files if stored is None else ():
        if key.partition(".")[0] not in chosen:  # model=tiny sets the model.path that a recipe requires
            OmegaConf.update(composed, key, "???")
    problems = list(_replaced_entries(chosen, composed, library, values, earlier))
    problems += [problem for key, value in values if (problem := _set(composed, key, value))]
    if problems:
        raise UserError("\n".join(problems))
    with _interpolating():
        defaults = device_defaults(lambda key: OmegaConf.select(composed, key), machine or Machine.here())
        rollout = composed.rollout
        defaults["rollout.max_staleness"] = staleness_bound(rollout.async_steps, rollout.max_staleness)
        for key, value in defaults.items():
            OmegaConf.update(composed, key, value)
    return Composition(composed, values)


def _sorted_overrides(
    overrides: list[str], library: Library
) -> tuple[list[str], list[tuple[str, Any]], dict[str, int]]:
    """Return the chosen group entries, the values of settings, and the number of values before each group's entry.

    Raise one UserError for all mistakes.
    """
    choices: list[str] = []
    values: list[tuple[str, Any]] = []
    earlier: dict[str, int] = {}
    problems = []
    _reject_spaces(overrides)
    for text in overrides:
        try:
            override = _parse_override(text)
            if override.key_or_group in (*library.groups, "recipes"):
                choices.append(_choice(override, library))
                earlier[override.key_or_group] = len(values)
            else:
                values += _flatten(override.key_or_group, override.value())
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return choices, values, earlier


def _replaced_entries(
    chosen: dict[str, str],
    composed: DictConfig,
    library: Library,
    typed: list[tuple[str, Any]],
    earlier: dict[str, int],
) -> Iterator[str]:
    """Yield a message for each chosen entry without effect.

    Either a recipe replaces the entry's only setting, or that setting is `typed` on the command line before the entry.
    A setting after the entry is not reported: it refines the entry.
    """
    values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
    for group in sorted(chosen.keys() & set(library.groups)):
        entry = yaml.safe_load(library.entries(group)[chosen[group]].read_bytes()) or {}
        for leaf, value in entry.items() if len(entry) == 1 else ():
            key = f"{group}.{leaf}"
            given = [i for i, (name, _) in enumerate(typed) if name == key]
            now = typed[given[-1]][1] if given else values[group].get(leaf)
            if not setting_of(key) or value in ("???", now):
                continue
            what = f"{group}={chosen[group]}: has no effect, because"
            if not given:
                better = shlex.quote(f"{key}={'null' if value is None else value}".replace("'", ""))
                yield f"{what} the recipe sets {key}={now}. Remove {key} from the recipe, or write {better}."
            elif value and given[-1] < earlier[group]:  # for an entry with an empty value, the order does not matter
                yield f"{what} {key}={now} is set, too. Remove one of them, or write {group}={chosen[group]} first."


def _set(composed: DictConfig, key: str, value: Any) -> str | None:
    """Set a setting of the command line. Return a message if the value is wrong."""
    setting = setting_of(key)
    try:
        if setting is not None and setting.reads_as_true(value):
            raise ValidationError(f"{value} is neither true nor false")
        OmegaConf.update(composed, key, value, merge=False, force_add=True)
    except GrammarParseError as error:
        return f"{key}={value}: {str(error).splitlines()[0]}."
    except OmegaConfBaseException:
        assert setting is not None
        shown = "null" if value is None else value
        return f"{key}={shown}: must be {setting.expects}.{syntax_hint(setting, value)}"
    return None


@dataclass(frozen=True)
class Combination:
    """Overrides of one run of a sweep; `swept` are the overrides that differ between runs."""

    overrides: list[str]
    swept: tuple[str, ...]
    numbers: tuple[int, ...]
    """Position of each value of `swept` in its list, from 1."""


def combinations(overrides: Sequence[str]) -> list[Combination]:
    """Return all combinations of Hydra's lists (`a=1,2`, `a=range(1,4)`, `a=choice(x,y)`). The last varies fastest."""
    alternatives = [list(enumerate(_alternatives(text), 1)) for text in overrides]
    found = []
    for chosen in product(*alternatives):
        swept = [pair for pair, others in zip(chosen, alternatives, strict=True) if len(others) > 1]
        texts, numbers = tuple(text for _, text in swept), tuple(number for number, _ in swept)
        found.append(Combination([text for _, text in chosen], texts, numbers))
    return found


def key_and_value(text: str) -> tuple[str, Any]:
    """Return the key and the value of an override. Raise UserError if `text` is not `KEY=VALUE`."""
    override = _parse_override(text)
    return override.key_or_group, override.value()


def _alternatives(text: str) -> list[str]:
    try:
        override = OverridesParser.create().parse_override(_quote_home_paths(text))
        if not override.is_sweep_override():
            return [text]
        if not override.is_discrete_sweep() or isinstance(override.value(), Glob):
            raise UserError(f"{text}: -m takes lists of values: KEY=a,b or KEY=range(1,4).")
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except HydraException:
        return [text]  # `composition` reports the mistake


def _quote_home_paths(text: str) -> str:
    """Quote paths that begin with `~` for Hydra's grammar. Shells do not expand the `~` of `model.path=~/DIR`."""
    if text.startswith("~") or '"' in text or "'" in text:
        return text
    return re.sub(r"(?<=[=\[,:])(~(?:/[^,\]}\s]*)?)(?=[,\]}]|$)", r'"\1"', text)


def _parse_override(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(_quote_home_paths(text))
    except HydraException as error:
        if "=" not in text:
            if text.endswith((".yaml", ".yml")):
                raise UserError(f"{text}: is not a setting. {recipe_hint()}") from error
            found = text if setting_of(text) else nearest_setting(text)
            write = path_override(text) or f"{found or 'KEY'}=VALUE"
            raise UserError(f"{text}: has no value; write {write}.") from error
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{text}: cannot be read ({reason}). Quote a value with special characters: KEY='\"VALUE\"'."
        ) from error
    if override.type is OverrideType.DEL:
        raise UserError(f"{text}: settings cannot be removed; write KEY=null, or recipes=null for no recipe.")
    if override.is_sweep_override():
        raise UserError(
            f"{text}: one run takes one value. Write a list in brackets, KEY=[a,b], or add -m for a run of each value."
        )
    if override.package is not None:
        raise UserError(f"{text}: write GROUP=ENTRY, without @.")
    return override


def _choice(override: Override, library: Library) -> str:
    """Return the override of a group or of `recipes` for Hydra. Raise UserError if the entry does not exist."""
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
            near = _recipe_elsewhere(name, library) if group == "recipes" else ""
            near = near or entry_hint(group, name, known)
            near = near or (_own_recipe(name, library) if group == "recipes" else "")
            raise UserError(f"{group}={name}: {what}.{near} Choices: {', '.join(known)}.")
    return f"{group}=[{','.join(names)}]"


def _recipe_elsewhere(name: str, library: Library) -> str:
    """Return a hint if the recipe is in a folder that is not searched; empty if there is no such file."""
    for folder in (Path.cwd(), *library.folders[1:]):
        if (folder / "recipes" / f"{name}.yaml").is_file():
            return f" There is one in {folder / 'recipes'}: add --config-dir {folder}."
        if (file := folder / f"{name}.yaml").is_file():
            return f" There is {file}: move it into {folder / 'recipes'}, and add --config-dir {folder}."
    return ""


def _own_recipe(name: str, library: Library) -> str:
    """Return the hint for an unknown recipe: where the trainer searches for the user's own recipes."""
    if not library.folders[1:]:
        return f" For your own recipe DIR/recipes/{name}.yaml, add --config-dir DIR."
    return f" {library.folders[-1]} (--config-dir) has no recipes/{name}.yaml."


def _reject_spaces(overrides: Sequence[str]) -> None:
    """Raise UserError for `KEY = VALUE` and `KEY= VALUE`, which the shell splits into words."""
    for before, text, after in zip(["", *overrides], overrides, [*overrides[1:], ""], strict=False):
        key = before if text == "=" else text.removesuffix("=")
        if key and text.endswith("=") and after and "=" not in after:
            raise UserError(f"{key} = {after}: white space ends a setting; write {key}={after}.")
    for start, text in enumerate(overrides):
        if "=" not in text or not _open_brackets(text):
            continue
        for end in range(start + 2, len(overrides) + 1):
            whole = " ".join(overrides[start:end])
            if not _open_brackets(whole):
                raise UserError(f"{whole}: white space ends a setting; quote it for the shell: {shlex.quote(whole)}.")


def _open_brackets(text: str) -> int:
    return sum(text.count(mark) for mark in "[{(") - sum(text.count(mark) for mark in ")}]")


def _flatten(key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the settings that `key=value` changes: one, or several in a section written as {a: 1, b: 2}."""
    if setting_of(key):
        return [(key, value)]
    if key not in SECTIONS:
        near = hint(key) or " `--cfg job` prints all settings."
        raise UserError(f"{key}={value}: there is no setting {key}.{near}")
    if not isinstance(value, dict):
        inside = next(k for k in SETTINGS if k.startswith(key + "."))
        raise UserError(f"{key}={value}: {key} is a section; set one of its settings, such as {inside}.")
    return [pair for name, item in value.items() for pair in _flatten(f"{key}.{name}", item)]


def _compose(choices: list[str], library: Library, stored: DictConfig | None) -> DictConfig:
    schema, primary = OmegaConf.structured(Config), "train"
    for key in (key for key, setting in SETTINGS.items() if setting.metadata["by_device"]):
        OmegaConf.update(schema, key, None)
    ConfigStore.instance().store(name="schema", node=schema if stored is None else stored)
    if stored is not None:
        primary, groups = "stored", [group for group in library.groups if group != "algorithm"]
        nothing_chosen = [{group: None} for group in (*groups, "algorithm", "recipes")]  # in the order of train.yaml
        ConfigStore.instance().store(name=primary, node={"defaults": ["schema", *nothing_chosen, "_self_"]})
    OmegaConf.register_new_resolver("rlhf.package", lambda path: str(PACKAGE / path), replace=True)
    ConfigFolder.groups = frozenset(library.groups)
    SourcesRegistry.instance().register(ConfigFolder)
    quoted = ",".join("'library://" + str(path).replace("'", "\\'") + "'" for path in library.folders)
    try:
        with initialize_config_dir(config_dir=str(library.conf), version_base="1.3"):
            return compose(primary, overrides=[*choices, f"hydra.searchpath=[{quoted}]"])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name}:{mark.line + 1}" if mark else " ".join(choices)
        raise UserError(f"{where}: not valid YAML: {error.problem or error.context}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{' '.join(choices)}: not a text file in YAML: {str(error).splitlines()[0]}.") from error
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if (head := group.partition("/")[0]) in library.groups:  # a Hub model's name contains a slash, too
            group, name = head, f"{group}/{name}".removeprefix(f"{head}/")
        where = f"{' '.join(choices)}: the defaults name {group + '=' * bool(group)}{name}, which does not exist."
        known = library.entries(group) if group in (*library.groups, "recipes") else {}
        near = entry_hint(group, name, known)
        raise UserError(f"{where}{near} Choices: {', '.join(known) or 'none'}.") from error
    except HydraException as error:
        raise UserError(composition_problem(error, choices, library)) from error


@contextmanager
def _interpolating() -> Iterator[None]:
    try:
        yield
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        if unset := re.search(r"Environment variable '(.*)' not found", reason):
            reason = f"the environment variable {unset[1]} is not set. Set it, or write ${{oc.env:{unset[1]},DEFAULT}}"
        raise UserError(f"{error.full_key}: {reason}.") from error
