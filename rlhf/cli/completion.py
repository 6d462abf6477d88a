"""Completes our commands in a shell, with Hydra's option --shell-completion install=bash. Imports no Hydra."""

import os
import re
import typing

from rlhf.config.known_settings import SECTIONS, SETTINGS
from rlhf.config.library import Library
from rlhf.errors import UserError

SHELLS = ("bash", "zsh")
# The query reads the whole line and returns whole words. If bash splits words at `=`, drop the text up to `=`.
SCRIPT = """\
_rlhf() {
    case "$COMP_LINE" in
        *" -m rlhf"*) ;;
        *) return ;;
    esac
    local choices word="${COMP_LINE:0:$COMP_POINT}"
    choices=$(COMP_LINE="$word" "${COMP_WORDS[0]}" -m rlhf.train --shell-completion query=bash 2> /dev/null)
    word="${word##* }"
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
    if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
    fi
}
complete -o nospace -o default -F _rlhf python python3
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
UNINSTALL = "complete -r python python3; unset -f _rlhf\n"


def answer(request: str, library: Library) -> str:
    """Return the output of `--shell-completion REQUEST`. A query reads the command line in $COMP_LINE.

    Raises:
        UserError: the request or the shell is unknown.
    """
    verb, _, shell = request.partition("=")
    if shell in SHELLS and verb == "install":
        return (ZSH if shell == "zsh" else "") + SCRIPT
    if shell in SHELLS and verb == "uninstall":
        return UNINSTALL
    if shell in SHELLS and verb == "query":
        return "\n".join(choices(os.environ.get("COMP_LINE", ""), library)) + "\n"
    shells = " or ".join(f"{verb}={shell}" for verb in ("install", "uninstall") for shell in SHELLS)
    raise UserError(f"--shell-completion {request} is unknown. Give {shells}.")


def choices(line: str, library: Library) -> list[str]:
    """Return the completions of the last word of `line`: commands, a command's options, or settings and their values.

    If the list is empty, the shell completes names of files, such as run directories.
    """
    before, _, word = line.rpartition(" ")
    if before.endswith(" -m"):
        return [command for command in OPTIONS if command.startswith(word)]
    command = re.search(r" -m (rlhf\.[\w.]+)", before)
    options = OPTIONS.get(command[1] if command else "", ())
    if word.startswith("-"):
        return [option for option in options if option.startswith(word)]
    return _settings(word, library) if "--config-dir" in options else []


def _settings(word: str, library: Library) -> list[str]:
    """Return a group's entries, a setting's choices, or the names of the next level."""
    key, equals, _ = word.partition("=")
    if equals:
        found = [f"{key}={value}" for value in _values(key, library)]
    else:
        level = word.count(".")
        names = [name for name in SETTINGS if name.count(".") == level]
        groups = (*library.groups, "recipes") if not level else ()
        found = [*(f"{name}=" for name in (*names, *groups)), *(f"{s}." for s in SECTIONS if s.count(".") == level)]
    return sorted({each for each in found if each.startswith(word)})


OPTIONS = {
    "rlhf.checkpoint": ("--help",),
    "rlhf.compare": ("--help", "--json"),
    "rlhf.doctor": ("--config-dir", "--help", "--json"),
    "rlhf.evaluate": ("--config-dir", "--help", "--json", "--trust-settings"),
    "rlhf.launch.kubernetes": (
        *("--backoff-limit", "--claim", "--config-dir", "--cpus", "--env-from-secret", "--help", "--image"),
        *("--memory", "--name", "--namespace", "--shm-size"),
    ),
    "rlhf.launch.slurm": ("--array-parallelism", "--config-dir", "--dry-run", "--help", "--multirun"),
    "rlhf.plan": ("--config-dir", "--device-memory", "--disk-speed", "--help", "--json", "--ranks"),
    "rlhf.report": ("--help", "--output", "--timeout"),
    "rlhf.samples": ("--all", "--best", "--count", "--grep", "--help", "--json", "--split", "--step", "--worst"),
    "rlhf.status": ("--help", "--json", "--port", "--serve", "--watch"),
    "rlhf.train": ("--cfg", "--config-dir", "--help", "--info", "--multirun", "--shell-completion", "--version"),
    "rlhf.translate": ("--help", "--trainer"),
}
"""Commands and their long options. Commands with --config-dir also take settings."""


def _values(key: str, library: Library) -> list[str]:
    if key in (*library.groups, "recipes"):
        return [*library.entries(key), *(["null"] if key == "recipes" else [])]
    if key not in SETTINGS:
        return []
    setting = SETTINGS[key]
    kinds = typing.get_args(setting.type) or (setting.type,)
    values = list(setting.metadata["choices"])
    values += ["true", "false"] if bool in kinds else []
    return [*values, *(["null"] if type(None) in kinds else [])]
