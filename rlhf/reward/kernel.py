"""Wraps the Linux system calls for confinement with ctypes: Landlock, seccomp, namespaces, capabilities.

Every function except `landlock_version` raises OSError if the kernel, or a container, rejects the call.
The numbers are from the kernel's `uapi` headers. Landlock: https://docs.kernel.org/userspace-api/landlock.html.
"""

import ctypes
import fcntl
import functools
import os
import platform
import socket
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 8, 38, 47
PR_CAP_AMBIENT_RAISE = 2
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_CALLS = {
    "seccomp": (317, 277),
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "pidfd_getfd": (438, 438),
    "open_by_handle_at": (304, 265),
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
}
"""System call numbers on x86_64 and on aarch64; None if the architecture lacks the call."""


@functools.cache
def _libc() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise OSError("this is not Linux")
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, *arguments: int) -> None:
    """Call `prctl(2)`; missing arguments are 0."""
    padded = (*arguments, 0, 0, 0, 0)[:4]
    _checked(_libc().prctl(option, *map(ctypes.c_ulong, padded)))


def unshare(flags: int) -> None:
    _checked(_libc().unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _checked(_libc().mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()))


def write_proc(path: str, text: str) -> None:
    """Write to a file of /proc in one call."""
    with Path(path).open("w") as file:
        file.write(text)


def permitted_capabilities() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in status if line.startswith("CapPrm:"))


def set_capabilities(mask: int) -> None:
    """Drop all capabilities except `mask`. Programs that the process starts also keep `mask`."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header, data = struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", low, low, low, high, high, high)
    _checked(_libc().capset(header, data))
    for capability in range(64):
        if mask >> capability & 1:
            prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability)


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 if the kernel has none."""
    try:
        return _checked(_libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    except OSError:
        return 0


def restrict_writing(version: int, paths: Sequence[str], *, abstract_sockets: bool) -> None:
    """With Landlock, allow writes only to `paths` and below, for good, in this process and all its children.

    These processes also cannot trace other processes, and from version 6 cannot signal other processes.
    """
    to_file = _WRITE_FILE | (_TRUNCATE if version >= 3 else 0)
    anything = to_file | _REMOVE_AND_MAKE | (_REFER if version >= 2 else 0)
    scoped = (_SCOPE_SIGNALS | (0 if abstract_sockets else _SCOPE_ABSTRACT_SOCKETS)) if version >= 6 else 0
    attributes = struct.pack("<3Q", anything, 0, scoped)
    ruleset = _checked(_libc().syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for path in paths:
            _allow(ruleset, path, to_file, anything)
        _checked(_libc().syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, to_file: int, anything: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_PATH)
    try:
        access = anything if stat.S_ISDIR(os.fstat(fd).st_mode) else to_file
        _checked(_libc().syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("<Qi", access, fd), 0))
    finally:
        os.close(fd)


def raise_loopback() -> None:
    """Switch on the network device `lo` of this process' network namespace."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        name, flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, get_flags, request))
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh22x", name, flags | up))


def forbid_calls(names: Sequence[str], *, unless_first: Mapping[str, Sequence[int]] | None = None) -> None:
    """With seccomp, make the system calls `names` fail with EPERM, for good, in this process and all its children.

    `unless_first`: calls that fail unless their first argument, an int, is one of these values.
    """
    architecture, column = _ARCHITECTURES.get(platform.machine(), (0, 0))
    if not architecture:
        raise OSError(f"the system call numbers of {platform.machine()} are unknown")
    numbers = [number for name in names if (number := _CALLS[name][column]) is not None]
    load, equal, at_least, ret = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    allow, fail = (ret, 0, 0, 0x7FFF0000), (ret, 0, 0, 0x00050000 | 1)  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO, EPERM
    by_argument = list[tuple[int, int, int, int]]()
    for name, values in (unless_first or {}).items():
        count, number = len(values), _CALLS[name][column]
        assert number is not None
        by_argument += [
            (equal, 0, count + 3, number),
            (load, 0, 0, 16),  # the low half of the first argument
            *((equal, count - i, 0, value) for i, value in enumerate(values)),
            fail,
            allow,
        ]
    deny = len(numbers) + len(by_argument) + 1
    program = [
        (load, 0, 0, 4),  # the architecture of the call, because numbers differ between architectures
        (equal, 0, deny + 2, architecture),
        (load, 0, 0, 0),  # the number of the call
        (at_least, deny, 0, 0x40000000),  # the x32 interface, the same calls under other numbers
        *((equal, deny - 1 - i, 0, number) for i, number in enumerate(numbers)),
        *by_argument,
        allow,
        fail,
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in program))
    filtered = struct.pack("@HP", len(program), ctypes.addressof(code))
    # Some kernels tie speculation mitigations to seccomp, which would slow down all code of the process.
    allow_speculation = 1 << 2
    _checked(_libc().syscall(_CALLS["seccomp"][column], 1, allow_speculation, filtered))
