"""Becomes a process as in a Kubernetes pod with the restricted profile, and runs a program: `python restricted_pod.py ARGV...`.

User 1000 where the program can be read by others (else this user), no capabilities, no_new_privs, and a filter that refuses
what the container runtimes' default profile refuses a container without capabilities.
"""

from __future__ import annotations

import ctypes  # noqa: F401 - the launcher's, while this user can still read it
import errno
import os
import platform
import struct
import sys

from paceline.reward.sandbox import launcher
from paceline.reward.sandbox.seccomp_filter import ARCHITECTURES, CONDITIONAL, REFUSED

DENIED = [
    "acct",
    "add_key",
    "bpf",
    "chroot",
    "clock_settime",
    "delete_module",
    "fanotify_init",
    "finit_module",
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "init_module",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "ioperm",
    "iopl",
    "kcmp",
    "kexec_load",
    "keyctl",
    "mount",
    "mount_setattr",
    "move_mount",
    "move_pages",
    "open_by_handle_at",
    "open_tree",
    "perf_event_open",
    "pidfd_getfd",
    "pivot_root",
    "quotactl",
    "reboot",
    "request_key",
    "setdomainname",
    "sethostname",
    "setns",
    "settimeofday",
    "swapoff",
    "swapon",
    "syslog",
    "umount2",
    "unshare",
    "userfaultfd",
    "vhangup",
]
CLONE_NAMESPACES = 0x7E020000


def pod_filter(machine: str) -> bytes:
    """The filter: EPERM for DENIED and for new namespaces, ENOSYS for clone3, all else allowed."""
    column, architecture = ARCHITECTURES[machine]
    allow, refuse = _op(0x06, 0x7FFF0000), _op(0x06, 0x00050000 | errno.EPERM)
    code = [_op(0x20, 4), _op(0x15, architecture, 1, 0), refuse, _op(0x20, 0)]
    for name in DENIED:
        code += [_op(0x15, REFUSED[name][column] or 0, 0, 1), refuse] if REFUSED[name][column] else []
    code += [_op(0x15, CONDITIONAL["clone3"][column] or 0, 0, 1), _op(0x06, 0x00050000 | errno.ENOSYS)]
    clone = [_op(0x20, 16), _op(0x45, CLONE_NAMESPACES, 0, 1), refuse, allow]
    return b"".join([*code, _op(0x15, CONDITIONAL["clone"][column] or 0, 0, len(clone)), *clone, allow])


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def interpreter_for_others() -> str | None:
    """A Python of at least 3.11 that every user can execute, this one first; None where there is none."""
    for candidate in (os.path.realpath(sys.executable), f"/usr/bin/python3.{sys.version_info[1]}"):
        parents = [candidate[:end] for end, sign in enumerate(candidate) if sign == "/" and end]
        if os.path.exists(candidate) and all(os.stat(each).st_mode & 0o001 for each in [*parents, candidate]):
            return candidate
    return None


def main(argv: list[str]) -> None:
    """Restrict this process and execute argv; `python` there is an interpreter that the user can read."""
    found = interpreter_for_others()
    if os.getuid() == 0 and found is not None:
        os.setgroups([])
        os.setresgid(1000, 1000, 1000)
        os.setresuid(1000, 1000, 1000)
    launcher.apply({"capabilities": ["none"], "seccomp": [pod_filter(platform.machine()).hex()]})
    command = [found or sys.executable if word == "python" else word for word in argv]
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
