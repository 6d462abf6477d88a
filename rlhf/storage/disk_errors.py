"""Defines checkpoint errors: damaged, not saved, and which of them a restart cannot fix."""

import errno

UNFIXABLE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
"""Disk errors that a restart cannot fix: full, over quota or file size limit, not permitted, read-only."""
UNREADABLE_ERRNOS = {errno.EIO, errno.EUCLEAN, errno.EBADMSG}
"""Disk errors for lost data: an input/output error, a broken structure, a checksum that does not match."""


class DamagedCheckpoint(Exception):
    """A checkpoint's bytes differ from the committed bytes, or the checkpoint was never committed."""


class OtherFormat(DamagedCheckpoint):
    """An intact checkpoint in the format of another version. It must not be set aside as damaged."""


class SaveFailed(Exception):
    """A save did not commit. The previous checkpoint is intact. `unfixable`: a restart cannot fix the error."""

    def __init__(self, message: str, *, unfixable: bool = False) -> None:
        super().__init__(message)
        self.unfixable = unfixable


def is_unfixable(error: BaseException) -> bool:
    """Return whether `error` is a disk error that a restart cannot fix."""
    if isinstance(error, SaveFailed):
        return error.unfixable
    return isinstance(error, OSError) and error.errno in UNFIXABLE_ERRNOS


def is_unreadable(error: OSError) -> bool:
    """Return whether `error` means lost data (damage) instead of a failure that may pass."""
    return error.errno in UNREADABLE_ERRNOS
