"""Uploads a model folder to the Hugging Face Hub in one commit; a second try sends only missing files."""

import logging
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

T = TypeVar("T")
log = logging.getLogger(__name__)
CARD = "README.md"
SILENCE_S = 300.0
"""A request fails if the Hub sends no answer, or accepts no bytes, for this many seconds."""
WAITS_S = (1.0, 5.0, 20.0)
"""Seconds before each retry after an error that may pass. Within each try, the Hub's client also retries."""
FILES_AT_A_TIME = 4
"""Weights files per upload call. A killed upload loses at most one such group."""
TRANSIENT = {408, 409, 412, 429, 500, 502, 503, 504}
"""Status codes after which to retry: the server is busy, or another commit came first."""
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Files that the commit replaces or deletes, because the repository must not keep the weights of an older model."""


def prepare_repository(repo_id: str, *, private: bool = False, revision: str | None = None) -> str:
    """Create the model repository `repo_id` and its branch `revision` if missing. Return its full name.

    Call this function before the work whose result is uploaded. Raises UserError when the Hub cannot be used (no token,
    no permission, an invalid name, no connection), and for `private` if the repository is public.
    """
    with _client(repo_id) as api:
        # Without `private`, pass None, because an organization may have its own default.
        url = _with_retries(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True))
        if private and not _with_retries(lambda: api.repo_info(url.repo_id)).private:
            raise UserError(
                f"--private: {repo_id} is public on the Hub; nothing was sent. Make it private in its settings there, "
                "give another name, or leave --private out."
            )
        if revision is not None and not revision.startswith("refs/"):
            _with_retries(lambda: api.create_branch(url.repo_id, branch=revision, exist_ok=True))
        return url.repo_id


def upload_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    card: str | None = None,
) -> str:
    """Upload the Hugging Face folder `folder` as the model repository `repo_id`, created if missing. Return the
    commit's URL.

    Weights are sent first; then one commit adds all files at once and deletes the weights of an older model. Files that
    the Hub has, from a killed upload or another commit, are not sent again. `card` is the model card for a folder
    without a README.md. Raises UserError like `files_to_send` and `prepare_repository`, and when all retries fail.
    """
    files = files_to_send(folder)
    repo_id = prepare_repository(repo_id, private=private, revision=revision)
    message = message or f"Upload {folder.name}"
    with _client(repo_id) as api:
        return _with_retries(lambda: _send(api, files, repo_id, revision, message, card))


def look_up_model(repo_id: str) -> tuple[str | None, str | None]:
    """Return name and license of a model of the Hub, each None if unknown. Raises like `prepare_repository`."""
    with _client(repo_id) as api:
        try:
            info = _with_retries(lambda: api.model_info(repo_id))
        except OSError as error:
            if _status(error) in (401, 403, 404):
                return None, None
            raise
        return repo_id, None if info.card_data is None else info.card_data.get("license")


def files_to_send(folder: Path) -> dict[str, Path]:
    """Return the files of a Hugging Face folder by their names in it, without hidden files.

    Raises UserError for a folder without config.json, for special files, and for a link that leads out of the folder:
    such a link could send anything.
    """
    root, files = folder.resolve(), {}
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if any(part.startswith(".") for part in name.parts) or path.is_dir():
                continue
            if not path.resolve().is_relative_to(root):
                raise UserError(
                    f"{path} is a link that leads out of the folder. Replace it by a copy of its target, or remove it."
                )
            if not stat.S_ISREG(path.stat().st_mode):
                raise UserError(f"{path} is not a regular file. Remove it: a repository contains only files.")
            files[name.as_posix()] = path
    except (OSError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be read ({error}); nothing was sent. Restore it.") from None
    if "config.json" not in files:
        raise UserError(f"{folder} is not a Hugging Face folder: it has no config.json. Make one with `merge`.")
    return files


def _send(
    api: "HfApi", files: dict[str, Path], repo_id: str, revision: str | None, message: str, card: str | None
) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    additions = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    if card is not None and CARD not in files:
        additions.append(CommitOperationAdd(CARD, card.encode()))
    _send_weights(api, [a for a in additions if a.path_in_repo.endswith(".safetensors")], repo_id, revision)
    gone: list[CommitOperationDelete] = []
    head = None
    if any(map(_WEIGHTS.fullmatch, files)):
        # With a parent commit, the Hub rejects the later of two concurrent uploads, which then retries. Otherwise the
        # repository would keep the weights of both models.
        head = api.repo_info(repo_id, revision=revision).sha
        there = api.list_repo_files(repo_id, revision=revision)
        gone = [CommitOperationDelete(name) for name in there if _WEIGHTS.fullmatch(name) and name not in files]
    commit = api.create_commit(
        repo_id, [*additions, *gone], commit_message=message, revision=revision, parent_commit=head
    )
    return commit.commit_url


def _send_weights(api: "HfApi", additions: "Sequence[CommitOperationAdd]", repo_id: str, revision: str | None) -> None:
    """Send the weights in groups of files. The Hub keeps a sent group even if a later one fails."""
    todo, sent = iter(additions), 0
    while group := list(islice(todo, FILES_AT_A_TIME)):
        api.preupload_lfs_files(repo_id, group, revision=revision, free_memory=False)
        sent += len(group)
        log.info("%d of %d files of weights are on the Hub.", sent, len(additions))


def _with_retries(action: Callable[[], T]) -> T:
    """Return the result of `action`; retry errors that may pass."""
    for wait_s in WAITS_S:
        try:
            return action()
        except Exception as error:
            if not _is_transient(_root(error)):
                raise
            log.warning("The request to the Hub failed: %s. Next try in %g s.", _describe(_root(error)), wait_s)
            time.sleep(wait_s)
    return action()


@contextmanager
def _client(repo_id: str) -> "Iterator[HfApi]":
    """Open the Hub's client with a deadline for each request. Turn its errors into UserErrors that omit the token."""
    import huggingface_hub
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from huggingface_hub.utils import logging as hub_logging

    if (token := huggingface_hub.get_token()) is None:
        raise UserError(
            f"{repo_id}: no token for the Hub. Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
        )
    verbosity, bars = hub_logging.get_verbosity(), sys.stderr.isatty()
    # huggingface_hub logs URLs, which may contain signatures. Our messages have the relevant part.
    hub_logging.set_verbosity_error()
    huggingface_hub.set_client_factory(_with_deadline)
    if not bars:
        disable_progress_bars()
    api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token, library_name="rlhf")
    try:
        yield api
    except (AttributeError, IndexError, KeyError, TypeError, JSONDecodeError, RecursionError) as error:
        raise UserError(
            f"{repo_id}: {api.endpoint} did not answer as the Hub does ({type(error).__name__}). Check HF_ENDPOINT; a "
            "proxy or a network's login page may answer in its place."
        ) from None
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{repo_id}: {_describe(_root(error))}. {_remedy(_root(error))}") from None
    finally:
        huggingface_hub.set_client_factory(_default_client)
        hub_logging.set_verbosity(verbosity)
        if not bars:
            enable_progress_bars()


def _with_deadline() -> Any:
    client = _default_client()
    client.timeout = SILENCE_S
    return client


def _default_client() -> Any:
    from huggingface_hub.utils._http import default_client_factory

    return default_client_factory()


def _root(error: BaseException) -> BaseException:
    """Return the cause of a transfer thread's RuntimeError, which itself only names the file; else return `error`."""
    return error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_transient(error: BaseException) -> bool:
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    if (status := _status(error)) is not None:
        return status in TRANSIENT
    return isinstance(error, (HTTPError, ConnectionError)) and not isinstance(error, OfflineModeIsEnabled)


def _describe(error: BaseException) -> str:
    """Describe the error in one line without the token."""
    from huggingface_hub import get_token

    status, answer = _status(error), getattr(error, "server_message", None)
    text = str(answer or (error if status is None else "") or type(error).__name__)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__).rstrip(".")
    line = line.replace(get_token() or "\0", "(the token)")
    if status is not None:
        return f"the Hub answered {status}" + (f" ({line})" if answer else "")
    return f"{line} ({type(error).__name__})"


def _remedy(error: BaseException) -> str:
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    again = "Run the same command again: files that the Hub has are not sent again."
    if isinstance(error, HFValidationError):
        return "Give the repository as NAMESPACE/NAME."
    if isinstance(error, OfflineModeIsEnabled):
        return "Unset HF_HUB_OFFLINE."
    remedies = {
        400: "The Hub rejected the request.",
        401: "The token is not valid: log in with `hf auth login`, or set HF_TOKEN to a token that may write.",
        403: "The token lacks the permission: give a repository of your own, or a token that may write there.",
        404: "Check the name and --revision; a token that may not see a repository gets the same answer.",
    }
    return remedies.get(_status(error) or 0, again)
