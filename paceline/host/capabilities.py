"""Capabilities that a process of root gives up for good."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
VERSION_3 = 0x20080522
OF_FILES_AND_USERS = frozenset({0, 1, 3, 4, 5, 6, 7, 10})
"""What programs of root need for files, users, signals and low ports: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID,
NET_BIND_SERVICE. What reads other processes' memory, changes the system or opens files past their path is not among them."""


def keep_capabilities(kept: frozenset[int] = OF_FILES_AND_USERS) -> None:
    """Give up all capabilities of this process but `kept`; no program that it executes regains them. Linux only. Raises OSError."""
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for number in range(
        64
    ):  # where the kernel knows no further ones, or there are none to lose, nothing happens
        if number not in kept:
            library.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    header = struct.pack("=Ii", VERSION_3, 0)
    held = ctypes.create_string_buffer(24)
    _check(library.capget(header, held))
    mask = sum(1 << each for each in kept)
    masks = [mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0, mask >> 32, mask >> 32, 0]
    left = [has & may for has, may in zip(struct.unpack("=6I", held.raw), masks, strict=True)]
    _check(library.capset(header, struct.pack("=6I", *left)))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"capabilities: {os.strerror(number)}")
