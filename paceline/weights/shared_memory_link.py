"""A link through host memory that both processes map: for a learner and a rollout worker on one host, whether or not they
share a GPU.

The interface and the promise are `WeightLink`'s: every wait ends by its deadline, a failure is this link's alone, and only
the receiver's acknowledgement over the control plane proves anything. The sender's memory has no name in any file
system (a memfd, opened through /proc), so nothing is left behind however the processes die. The two keep in step by keys of
the store at which they met; the sender writes a version only after the member has answered the one before.

Host memory, also between GPUs: a version is copied off the learner's GPU when it is gathered, and onto the worker's by the
engine's swap.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.errors import Unavailable
from paceline.weights.manifest import WeightManifest

if TYPE_CHECKING:
    import torch


MAX_PATH_BYTES = 64


class SharedLink:
    """One side of the shared memory. Used by one thread at a time; after an error it is only good for dropping."""

    def __init__(self, store: Any, max_wait_s: float) -> None:
        self._store = store
        self._timeout = timedelta(seconds=max_wait_s)
        self._sent = 0
        self._memory: torch.Tensor | None = None
        self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def send(
        self,
        flat: torch.Tensor,
        manifest: WeightManifest,
        on_bucket: Callable[[int], None] | None = None,
    ) -> None:
        """As `WeightLink.send`."""
        if self._memory is None:
            self._memory = self._create(manifest.total_bytes)
        for begin, end in manifest.buckets():
            self._memory[begin:end].copy_(flat[begin:end])
            self._sent += 1
            self._store.set(f"sent/{self._sent}", "1")
            if on_bucket is not None:
                on_bucket(end)

    def receive(
        self,
        flat: torch.Tensor,
        manifest: WeightManifest,
        on_bucket: Callable[[int], None] | None = None,
    ) -> None:
        """As `WeightLink.receive`."""
        for begin, end in manifest.buckets():
            self._sent += 1
            self._await(f"sent/{self._sent}", f"weights stopped before byte {end}")
            if self._memory is None:
                self._memory = self._open(manifest.total_bytes)
            flat[begin:end].copy_(self._memory[begin:end])
            if on_bucket is not None:
                on_bucket(end)

    def _create(self, size_bytes: int) -> torch.Tensor:
        self._fd = os.memfd_create("paceline-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._store.set("segment", f"/proc/{os.getpid()}/fd/{self._fd}")
        return _mapped(self._fd, size_bytes, mmap.ACCESS_WRITE)

    def _open(self, size_bytes: int) -> torch.Tensor:
        path = self._store.get("segment")[:MAX_PATH_BYTES].decode(errors="replace")
        if not re.fullmatch(r"/proc/[0-9]+/fd/[0-9]+", path):
            raise Unavailable(f"{path!r} is offered as the learner's memory, and is none")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Unavailable(
                f"the learner's memory {path} cannot be opened ({error.strerror}); weights.backend=shared needs both "
                "processes on one host, with one user and one process namespace"
            ) from error
        try:
            if os.fstat(fd).st_size != size_bytes:
                raise Unavailable(
                    f"{path} has {os.fstat(fd).st_size} bytes, the offer says {size_bytes}: this is not the learner's host"
                )
            if not _seals(fd) & fcntl.F_SEAL_SHRINK:
                # Reading memory that its owner cuts off ends the process that reads.
                raise Unavailable(f"{path} can be cut off while it is read: this is not the learner's memory")
            return _mapped(fd, size_bytes, mmap.ACCESS_COPY)
        finally:
            os.close(fd)

    def _await(self, key: str, what: str) -> None:
        try:
            self._store.wait([key], self._timeout)
            self._store.delete_key(key)
        except RuntimeError as error:
            raise Unavailable(f"{what}: {str(error).splitlines()[0]}") from error


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memory without a name
        return 0


def _mapped(fd: int, size_bytes: int, access: int) -> torch.Tensor:
    import torch

    # The mapping outlives the descriptor and belongs to the tensor. A private mapping is what makes a view of another
    # process's memory writable for torch; nobody writes to it.
    return torch.frombuffer(mmap.mmap(fd, size_bytes, access=access), dtype=torch.uint8)
