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

import mmap
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.errors import Unavailable
from paceline.weights import WeightManifest

if TYPE_CHECKING:
    import torch


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
        self._fd = os.memfd_create("paceline-weights")
        os.ftruncate(self._fd, size_bytes)
        self._store.set("segment", f"/proc/{os.getpid()}/fd/{self._fd}")
        return _mapped(self._fd, size_bytes, mmap.ACCESS_WRITE)

    def _open(self, size_bytes: int) -> torch.Tensor:
        path = self._store.get("segment").decode()
        try:
            fd = os.open(path, os.O_RDONLY)
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
            return _mapped(fd, size_bytes, mmap.ACCESS_COPY)
        finally:
            os.close(fd)

    def _await(self, key: str, what: str) -> None:
        try:
            self._store.wait([key], self._timeout)
            self._store.delete_key(key)
        except RuntimeError as error:
            raise Unavailable(f"{what}: {str(error).splitlines()[0]}") from error


def _mapped(fd: int, size_bytes: int, access: int) -> torch.Tensor:
    import torch

    # The mapping outlives the descriptor and belongs to the tensor. A private mapping is what makes a view of another
    # process's memory writable for torch; nobody writes to it.
    return torch.frombuffer(mmap.mmap(fd, size_bytes, access=access), dtype=torch.uint8)
