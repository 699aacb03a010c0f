"""Restricts this process and its children for good: by Landlock (Linux's userspace-api/landlock), without privileges,
and by dropping capabilities. A restricted process may trace only processes with at least its own restrictions,
whichever user runs it, so it cannot read environment, memory or descriptors of any other process. With `SCOPES` it can
send signals only to such processes, and connect only to their abstract sockets. A process with restricted rights on
files cannot mount file systems."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
VERSION_3 = 0x20080522
OF_FILES_AND_USERS = frozenset({0, 1, 3, 4, 5, 6, 7, 10})
"""Root's capabilities for files, users, signals and low ports: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
SETUID, NET_BIND_SERVICE. No capability to read other memory, change the system or open files past their path is among
them."""
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
TRUNCATE, ALL_FILE_RIGHTS = 1 << 14, (1 << 15) - 2
"""All rights in ABI 3 except the execution of files."""
OF_FILES = WRITE_FILE | READ_FILE | TRUNCATE
"""File rights that a rule for a file (not a folder) may grant."""
SCOPES = 0b11
"""Scopes of abstract sockets and of signals, available from ABI `SCOPES_ABI` on."""
SCOPES_ABI = 6


def landlock_abi() -> int:
    """Return the ABI version of Landlock in this kernel; 0 without it."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        return _syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG))
    except OSError:
        return 0


def restrict(rights: int = 0, rules: Iterable[tuple[str, int]] = ()) -> None:
    """Scope this process and its later children by SCOPES, and drop the file rights `rights` except those granted by
    `rules`: (path, rights below it). A path that is missing or a link gets no rule. Needs ABI 6. Raises OSError."""
    ruleset = _syscall(CREATE_RULESET, struct.pack("=3Q", rights, 0, SCOPES), ctypes.c_size_t(24), ctypes.c_uint32(0))
    try:
        for path, granted in rules:
            _allow(ruleset, path, granted)
        _check(ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # missing, or unreachable for this user, who then needs no rule
    try:
        mode = os.fstat(opened).st_mode
        if stat.S_ISLNK(mode):
            return
        if not stat.S_ISDIR(mode):
            rights &= OF_FILES
        rule = struct.pack("=Qi", rights, opened)
        _syscall(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(RULE_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(opened)


def _syscall(number: int, *arguments: object) -> int:
    return _check(int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments)))


def keep_capabilities(kept: frozenset[int] = OF_FILES_AND_USERS) -> None:
    """Drop this process's capabilities but `kept`, also for programs that it executes. Linux only. Raises OSError."""
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "capabilities")
    # Fails without effect for a number that the kernel does not know, or without the right to drop any.
    for number in range(64):
        if number not in kept:
            library.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    header = struct.pack("=Ii", VERSION_3, 0)
    held = ctypes.create_string_buffer(24)
    _check(library.capget(header, held), "capabilities")
    mask = sum(1 << each for each in kept)
    masks = [mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0, mask >> 32, mask >> 32, 0]
    left = [has & may for has, may in zip(struct.unpack("=6I", held.raw), masks, strict=True)]
    _check(library.capset(header, struct.pack("=6I", *left)), "capabilities")


def _check(result: int, what: str = "Landlock") -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
