"""The filter of system calls for a sandboxed program, as a classic BPF program (seccomp(2), mode filter).

It allows what `paceline.reward.sandbox.syscalls` lists. With a single process it also refuses to start another one and to signal
any process but the program's own, so a fork bomb, a daemon and a signal to the caller are impossible without namespaces or
cgroups.
"""

from __future__ import annotations

import errno
import functools
import struct

from paceline.errors import InvalidInput
from paceline.reward.sandbox.syscalls import ALLOWED, CONDITIONAL, IGNORED, REFUSED, UNSUPPORTED

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables and AUDIT_ARCH, by `platform.machine()`."""

OWN_PID = 0x7FEEDFEE
"""Stands for the program's process id; the launcher, which becomes the program, puts its own there."""

ALLOW, KILL = 0x7FFF0000, 0x80000000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06

CLONE_THREAD = 0x00010000
CLONE_NAMESPACES = 0x7E020000  # all CLONE_NEW* that clone(2) takes
AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
PRCTLS = (3, 15, 16, 21, 38, 39, 0x53564D41)
"""PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS, PR_SET_VMA."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
OWNER_AND_LEASES = (
    8,
    10,
    15,
    1024,
    1026,
)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY: signals to others
X32_BIT = 0x40000000


@functools.cache
def build_filter(machine: str, single_process: bool) -> bytes:
    """Return the program for `machine` (as platform.machine()), 8 bytes an instruction, with OWN_PID for the process.

    Raises InvalidInput for an architecture whose system calls are not known here.
    """
    if machine not in ARCHITECTURES:
        raise InvalidInput(
            f"system calls of {machine} are not filtered by this version, only those of {', '.join(ARCHITECTURES)}; "
            "use sandbox: remote"
        )
    column, architecture = ARCHITECTURES[machine]
    code = [
        *(_op(LOAD, ARCHITECTURE), _op(EQUAL, architecture, 1, 0), _op(RETURN, KILL)),
        *(_op(LOAD, NUMBER), _op(AT_LEAST, X32_BIT, 0, 1), _error(errno.ENOSYS)),
    ]
    for name, numbers in CONDITIONAL.items():
        if numbers[column] is not None:
            code += _when(numbers[column] or 0, _condition(name, single_process))
    for table, answer in (
        (ALLOWED, _op(RETURN, ALLOW)),
        (REFUSED, _error(errno.EPERM)),
        (IGNORED, _error(0)),
        (UNSUPPORTED, _error(errno.EOPNOTSUPP)),
    ):
        for numbers in table.values():
            if numbers[column] is not None:
                code += _when(numbers[column] or 0, [answer])
    return b"".join([*code, _error(errno.ENOSYS)])


def _condition(name: str, single_process: bool) -> list[bytes]:
    """Return the instructions that answer call `name` by its arguments."""
    allow, refuse = _op(RETURN, ALLOW), _error(errno.EPERM)
    match name:
        case "clone3":  # its flags are behind a pointer; the C library falls back to clone
            return [_error(errno.ENOSYS)]
        case "clone" if single_process:
            return [_argument(0), _op(ANY_BIT, CLONE_THREAD, 0, 1), allow, refuse]
        case "clone":
            return [_argument(0), _op(ANY_BIT, CLONE_NAMESPACES, 1, 0), allow, refuse]
        case "fork" | "vfork":
            return [refuse if single_process else allow]
        case "kill" | "tgkill" | "rt_sigqueueinfo" | "rt_tgsigqueueinfo":
            own = [_argument(0), _op(EQUAL, OWN_PID, 0, 1), allow, refuse]
            return own if single_process else [allow]
        case "socketpair":  # a datagram socket could send to any path
            unix = [_argument(0), _op(EQUAL, AF_UNIX, 1, 0), refuse]
            return [
                *unix,
                *(_argument(1), _op(AND, SOCK_TYPE_MASK), _op(EQUAL, SOCK_STREAM, 0, 1), allow, refuse),
            ]
        case "prctl":
            return [*_any_of(0, PRCTLS, allow), refuse]
        case "prlimit64" | "sched_setaffinity":
            return [_argument(0), _op(EQUAL, 0, 0, 1), allow, refuse]
        case "ioctl":
            return [*_any_of(1, (TIOCSTI, TIOCLINUX), refuse), allow]
        case "fcntl":
            return [*_any_of(1, OWNER_AND_LEASES, refuse), allow]
    raise AssertionError(f"{name} has no condition")


def _any_of(argument: int, values: tuple[int, ...], answer: bytes) -> list[bytes]:
    tests = [part for value in values for part in (_op(EQUAL, value, 0, 1), answer)]
    return [_argument(argument), *tests]


def _when(number: int, block: list[bytes]) -> list[bytes]:
    """Return `block`, which always returns, behind a test of the call's number."""
    return [_op(EQUAL, number, 0, len(block)), *block]


def _argument(index: int) -> bytes:
    """Load the low half of an argument; all arguments that are compared here are 32 bits wide for the kernel."""
    return _op(LOAD, FIRST_ARGUMENT + 8 * index)


def _error(number: int) -> bytes:
    return _op(RETURN, 0x00050000 | number)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
