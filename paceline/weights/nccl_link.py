"""A link by NCCL between two processes that hold the memory: the learner's rank sends from its GPU, the engine receives into its.

The two sides first tell each other NCCL's version, over any store that both reach, and refuse another one before either begins: a
mismatched pair would fail inside NCCL, or wait there. Then they form a communicator of two without blocking. Bytes go bucket by
bucket on a stream of the link's own, so that nothing of it stands in the compute stream.

The promise: `form_nccl_link`, `send` and `receive` each end within `max_wait_s` of silence or raise Unavailable, and then the
communicator is aborted, which frees it and harms nothing else in the process. What was received is proved by digests, not here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import Conflict, Unavailable
from paceline.weights.manifest import WeightManifest
from paceline.weights.nccl_library import NcclLibrary

if TYPE_CHECKING:
    import torch

SENDER, RECEIVER = 0, 1
POLL_S = 0.001


class Memory(Protocol):
    """Bytes on a GPU."""

    def pointer(self) -> int:
        """Return the address of the first byte."""


class Stream(Protocol):
    """A stream of the link's own."""

    def handle(self) -> int:
        """Return the stream, as NCCL takes it."""

    def is_idle(self) -> bool:
        """Return whether everything enqueued has run."""


class TensorMemory:
    """A tensor of bytes on a GPU, which must not be freed or moved while a link uses it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def pointer(self) -> int:
        """As `Memory.pointer`."""
        return int(self._tensor.data_ptr())


class CudaStream:
    """A stream of the current device, beside the one that computes."""

    def __init__(self) -> None:
        import torch

        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def handle(self) -> int:
        """As `Stream.handle`."""
        return int(self._stream.cuda_stream)

    def is_idle(self) -> bool:
        """As `Stream.is_idle`."""
        return bool(self._stream.query())


class NcclLink:
    """One formed pair. Used by one thread at a time; after an error it is only good for dropping."""

    def __init__(
        self, library: NcclLibrary, communicator: Any, rank: int, stream: Stream, max_wait_s: float
    ) -> None:
        self._library, self._communicator = library, communicator
        self._peer, self._stream, self._max_wait_s = 1 - rank, stream, max_wait_s

    def send(
        self, memory: Memory, manifest: WeightManifest, on_bucket: Callable[[int], None] = lambda _: None
    ) -> None:
        """Send a version bucket by bucket; `on_bucket` gets the bytes that have left this device. Raises Unavailable."""
        self._run(self._library.send, memory, manifest, on_bucket)

    def receive(
        self, memory: Memory, manifest: WeightManifest, on_bucket: Callable[[int], None] = lambda _: None
    ) -> None:
        """Receive a version bucket by bucket; `on_bucket` gets the bytes that are in `memory`. Raises Unavailable."""
        self._run(self._library.receive, memory, manifest, on_bucket)

    def close(self) -> None:
        """Abort the communicator. May be called twice."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._library.abort(communicator)

    def _run(
        self,
        transfer: Callable[[Any, int, int, int, int], None],
        memory: Memory,
        manifest: WeightManifest,
        on_bucket: Callable[[int], None],
    ) -> None:
        if self._communicator is None:
            raise Unavailable("this NCCL link has ended")
        try:
            for begin, end in manifest.buckets():
                transfer(
                    self._communicator,
                    memory.pointer() + begin,
                    end - begin,
                    self._peer,
                    self._stream.handle(),
                )
                # The library first, because a failed communicator's stream may never run dry.
                _await(
                    lambda: self._library.done(self._communicator) and self._stream.is_idle(),
                    self._max_wait_s,
                    f"bytes {begin} to {end} did not pass",
                )
                on_bucket(end)
        except BaseException:
            self.close()
            raise


def form_nccl_link(
    library: NcclLibrary, store: Any, rank: int, stream: Stream, max_wait_s: float
) -> NcclLink:
    """Meet the other side at `store` (torch's store interface, one prefix for each attempt) and form the pair.

    Raises Conflict for another version of NCCL on the other side, before either has begun; Unavailable when it did not come.
    """
    timeout = timedelta(seconds=max_wait_s)
    own = library.version()
    store.set(f"nccl/{rank}", str(own))
    try:
        store.wait([f"nccl/{1 - rank}"], timeout)
        other = int(store.get(f"nccl/{1 - rank}"))
        if other != own:
            raise Conflict(
                f"NCCL is {own} here and {other} on the other side: two versions form no communicator. Install one version "
                "of torch for learner and engine, or leave weights.backend to auto"
            )
        if rank == SENDER:
            store.set("nccl/id", library.unique_id().hex())
        store.wait(["nccl/id"], timeout)
        unique_id = bytes.fromhex(store.get("nccl/id").decode())
    except (RuntimeError, ValueError) as error:
        raise Unavailable(f"no NCCL link: {str(error).splitlines()[0]}") from error
    communicator = library.begin(unique_id, rank, 2)
    try:
        _await(lambda: library.done(communicator), max_wait_s, "the other side did not form the communicator")
    except BaseException:
        library.abort(communicator)
        raise
    return NcclLink(library, communicator, rank, stream, max_wait_s)


def _await(is_done: Callable[[], bool], max_wait_s: float, what: str) -> None:
    deadline_s = time.monotonic() + max_wait_s
    while not is_done():
        if time.monotonic() > deadline_s:
            raise Unavailable(f"{what} within {max_wait_s} s")
        time.sleep(POLL_S)
