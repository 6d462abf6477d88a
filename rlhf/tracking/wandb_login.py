"""Checks for a wandb login in the same files and variables as wandb, so that a run without login fails at its start."""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rlhf.config import WandbConfig
from rlhf.errors import UserError, did_you_mean, nearest

NO_LOGIN = (
    "nobody is logged in to wandb. Run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline (or "
    "tracking.wandb.mode=offline) for files that `wandb sync` uploads later"
)
ONLINE, OFFLINE = ("online", "run"), ("offline", "dryrun")
_DEFAULT_URL = "https://api.wandb.ai"
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def mode_of(config: WandbConfig, environ: Mapping[str, str] = os.environ) -> str:
    """Return `tracking.wandb.mode`, or `offline` if WANDB_MODE in the environment is offline."""
    return "offline" if environ.get("WANDB_MODE", "").lower() in OFFLINE else config.mode


def check_login(config: WandbConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if WANDB_MODE is invalid, or if an online run finds no key. Does not import wandb."""
    mode = environ.get("WANDB_MODE", "")
    if mode and mode.lower() not in (*ONLINE, *OFFLINE):
        raise UserError(
            f"WANDB_MODE={mode}: must be online or offline.{did_you_mean(nearest(mode.lower(), (*ONLINE, *OFFLINE)))} "
            "For a run without wandb, remove wandb from trainer.logger."
        )
    if mode_of(config, environ) == "online" and not _has_key(environ):
        raise UserError(f"trainer.logger=[wandb]: {NO_LOGIN}.")


def _has_key(environ: Mapping[str, str]) -> bool:
    if any(environ.get(name) for name in _KEYS):
        return True
    home = Path(environ.get("HOME", "~")).expanduser()
    settings = Path(environ.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb", "settings")
    # A settings file may contain a key or another server's URL, which only wandb can check.
    if any(_mentions(path, ("api_key", "base_url")) for path in (settings, Path("wandb", "settings"))):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or _DEFAULT_URL).netloc
    paths = [Path(environ["NETRC"]).expanduser()] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    return any(_has_entry(path, host) for path in paths)


def _mentions(path: Path, words: tuple[str, ...]) -> bool:
    try:
        text = path.read_text()
    except OSError:
        return False
    return any(word in text for word in words)


def _has_entry(path: Path, host: str) -> bool:
    """Return whether a netrc file has a key for `host`; True for an unreadable file, on which wandb itself fails."""
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except FileNotFoundError:
        return False
    except (netrc.NetrcParseError, OSError):
        return True
