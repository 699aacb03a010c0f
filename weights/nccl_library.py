"""Binds the part of NCCL's C interface that sends between GPUs: no process group, no watchdog, no blocking call.

A communicator is made in non-blocking mode: every call returns at once, and `done` tells whether it has ended or
failed. So a peer that never comes, or dies, costs a poll with a deadline and an `abort`, and affects no other
communicator of the process. Source: NVIDIA, NCCL user guide, "Communicator creation and management functions" and
"Fault tolerance" (ncclCommInitRankConfig with blocking = 0, ncclCommGetAsyncError, ncclCommAbort).
"""

from __future__ import annotations

import ctypes
import glob
import sysconfig
from typing import Any

from paceline.errors import Unavailable

UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1
MAGIC = 0xCAFEBEEF


class _Config(ctypes.Structure):
    """ncclConfig_t with the fields of NCCL 2.14 only: `size` tells the library that there are no further fields."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class LoadedNccl:
    """NCCL as installed with torch, or the system's. Handles are opaque. All methods raise Unavailable."""

    def __init__(self) -> None:
        site = sysconfig.get_paths()["purelib"]
        paths = [*glob.glob(f"{site}/nvidia/nccl/lib/libnccl.so.2"), "libnccl.so.2"]
        for path in paths:
            try:
                self._library = ctypes.CDLL(path)
                break
            except OSError:
                continue
        else:
            raise Unavailable(f"no NCCL is installed: none of {', '.join(paths)} can be loaded")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def version(self) -> int:
        """Return NCCL's version, such as 22907 for 2.29.7. Two versions never form a communicator."""
        version = ctypes.c_int()
        self._check(self._library.ncclGetVersion(ctypes.byref(version)))
        return version.value

    def unique_id(self) -> bytes:
        """Return the id of a new communicator; both sides need the same one."""
        made = _UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def begin(self, unique_id: bytes, rank: int, ranks: int) -> ctypes.c_void_p:
        """Begin to form a communicator on the current device, and return its handle at once."""
        communicator = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), MAGIC, 21400, 0)
        given = _UniqueId.from_buffer_copy(unique_id)
        result = self._library.ncclCommInitRankConfig(
            ctypes.byref(communicator), ranks, given, rank, ctypes.byref(config)
        )
        self._check(result)
        return communicator

    def done(self, communicator: ctypes.c_void_p) -> bool:
        """Return whether all operations on the communicator's host side have ended. Raises Unavailable if it failed."""
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(communicator, ctypes.byref(state)))
        self._check(state.value)
        return state.value == SUCCESS

    def send(self, communicator: ctypes.c_void_p, pointer: int, size_bytes: int, peer: int, stream: int) -> None:
        """Enqueue the bytes at `pointer` on a stream of the current device."""
        self._transfer(self._library.ncclSend, communicator, pointer, size_bytes, peer, stream)

    def receive(self, communicator: ctypes.c_void_p, pointer: int, size_bytes: int, peer: int, stream: int) -> None:
        self._transfer(self._library.ncclRecv, communicator, pointer, size_bytes, peer, stream)

    def abort(self, communicator: ctypes.c_void_p) -> None:
        """End the communicator with its pending operations; kernels that wait for the peer return."""
        self._check(self._library.ncclCommAbort(communicator))

    def _transfer(
        self, call: Any, communicator: ctypes.c_void_p, pointer: int, size_bytes: int, peer: int, stream: int
    ) -> None:
        self._check(
            call(
                ctypes.c_void_p(pointer),
                ctypes.c_size_t(size_bytes),
                UINT8,
                peer,
                communicator,
                ctypes.c_void_p(stream),
            )
        )

    def _check(self, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            raise Unavailable(f"NCCL: {self._library.ncclGetErrorString(result).decode()}")
