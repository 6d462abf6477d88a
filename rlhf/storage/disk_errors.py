"""Errors of checkpoints on disk: one is damaged, or could not be saved; and which a restart cannot cure."""

import errno

UNFIXABLE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
"""Conditions of the disk that a restart meets again: full, over quota or file size limit, not permitted, read-only."""
UNREADABLE_ERRNOS = {errno.EIO, errno.EUCLEAN, errno.EBADMSG}
"""What file systems answer when a disk has lost data: an input/output error, a broken structure, a checksum that does
not match."""


class DamagedCheckpoint(Exception):
    """A checkpoint's bytes are not the ones that were committed (or it was never committed)."""


class OtherFormat(DamagedCheckpoint):
    """A checkpoint's bytes are as committed, by a version of the trainer with another format: nothing to set aside."""


class SaveFailed(Exception):
    """A save did not commit. The previous checkpoint is intact.

    `unfixable` says that a restart would meet the same condition (disk full, permission).
    """

    def __init__(self, message: str, *, unfixable: bool = False) -> None:
        super().__init__(message)
        self.unfixable = unfixable


def is_unfixable(error: BaseException) -> bool:
    """Whether `error` is a condition of the disk that a restart cannot cure."""
    if isinstance(error, SaveFailed):
        return error.unfixable
    return isinstance(error, OSError) and error.errno in UNFIXABLE_ERRNOS


def is_unreadable(error: OSError) -> bool:
    """Whether `error` says that what lies on the disk is lost, so that it is damage and no passing trouble."""
    return error.errno in UNREADABLE_ERRNOS
