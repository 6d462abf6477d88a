"""The errors that a restart cannot fix, and the exit codes that the supervisor and schedulers read."""

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
# EX_TEMPFAIL of sysexits.h: SLURM, Kubernetes and batch systems can be told to requeue on it.
EXIT_REQUEUE = 75


class UserError(Exception):
    """A mistake in the settings, the data or the files that only a person can mend.

    The message names the setting, its value and the remedy. It ends the run with `EXIT_USER_ERROR`; it is never retried.
    """


class Preempted(Exception):
    """The run was asked to stop, has saved and leaves with `EXIT_REQUEUE`."""
