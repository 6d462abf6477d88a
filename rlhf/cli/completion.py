"""Completes python -m rlhf.train in a shell, with Hydra's option --shell-completion install=bash. Imports no Hydra."""

import os
import typing

from rlhf.config.known_settings import SECTIONS, SETTINGS
from rlhf.config.library import Library
from rlhf.errors import UserError

SHELLS = ("bash", "zsh")
# The query receives the line unchanged and answers with whole words, which `=` must not divide.
SCRIPT = """\
_rlhf_train() {
    case "$COMP_LINE" in
        *" -m rlhf.train "*) ;;
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
complete -o nospace -o default -F _rlhf_train python python3
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
UNINSTALL = "complete -r python python3; unset -f _rlhf_train\n"


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
        word = os.environ.get("COMP_LINE", "").rpartition(" ")[2]
        return "\n".join(choices(word, library)) + "\n"
    shells = " or ".join(f"{verb}={shell}" for verb in ("install", "uninstall") for shell in SHELLS)
    raise UserError(f"--shell-completion {request} is unknown. Give {shells}.")


def choices(word: str, library: Library) -> list[str]:
    """Return the completions of `word`: a group's entries, a setting's choices, or the names of the next level."""
    key, equals, _ = word.partition("=")
    if equals:
        found = [f"{key}={value}" for value in _values(key, library)]
    else:
        level = word.count(".")
        names = [name for name in SETTINGS if name.count(".") == level]
        groups = (*library.groups, "recipes") if not level else ()
        found = [*(f"{name}=" for name in (*names, *groups)), *(f"{s}." for s in SECTIONS if s.count(".") == level)]
        found += [option for option in OPTIONS if word.startswith("-")]
    return sorted({each for each in found if each.startswith(word)})


OPTIONS = ("--cfg", "--config-dir", "--help", "--info", "--multirun", "--version")


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
