"""The control plane's BundleService: receives the files of runs one by one, and serves them to workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import IO, Any

import grpc

from paceline.bundle.manifest import MAX_FILES
from paceline.errors import Conflict, InvalidInput, Unavailable
from paceline.services.common.serving.grpc_server import with_status, with_stream_status
from paceline.services.coordinator.blobs import CHUNK_BYTES, BlobStore
from paceline.v1 import bundle_pb2, bundle_pb2_grpc

PART_WAIT_S = 60.0
"""Seconds to wait for the next part of a file. If it does not arrive, the parts that were received are kept."""
Context = grpc.aio.ServicerContext[Any, Any]


class BundleServicer(bundle_pb2_grpc.BundleServiceServicer):
    def __init__(self, store: BlobStore):
        self._store = store
        self._verifying = asyncio.Lock()

    @with_status
    async def Missing(self, request: bundle_pb2.MissingRequest, context: Context) -> bundle_pb2.MissingResponse:
        if len(request.blobs) > MAX_FILES + 1:
            raise InvalidInput(f"the request lists {len(request.blobs)} files, but a bundle has at most {MAX_FILES}")
        async with self._verifying:  # waits until the client's deadline at most
            response: bundle_pb2.MissingResponse = await _shielded(self._missing, request)
        return response

    def _missing(self, request: bundle_pb2.MissingRequest) -> bundle_pb2.MissingResponse:
        missing = self._store.missing({blob.sha256: blob.size for blob in request.blobs})
        blobs = [bundle_pb2.MissingBlob(sha256=sha256, offset=offset) for sha256, offset in missing.items()]
        return bundle_pb2.MissingResponse(missing=blobs)

    @with_status
    async def Put(
        self, request_iterator: AsyncIterator[bundle_pb2.PutRequest], context: Context
    ) -> bundle_pb2.PutResponse:
        upload = Upload(self._store)
        parts = aiter(request_iterator)
        try:
            while True:
                try:
                    async with asyncio.timeout(PART_WAIT_S):
                        part = await anext(parts)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    raise Unavailable(f"no part of a file came for {PART_WAIT_S:g} s; send the rest again") from None
                await _shielded(upload.take, part.sha256, part.size, part.offset, part.data)
            upload.finish()
        finally:
            upload.close()
        return bundle_pb2.PutResponse(num_blobs=upload.num_blobs)

    @with_stream_status
    async def Fetch(
        self, request: bundle_pb2.FetchRequest, context: Context
    ) -> AsyncIterator[bundle_pb2.FetchResponse]:
        chunks = self._store.read(request.sha256, request.offset, request.length)
        try:
            while (chunk := await _shielded(next, chunks, None)) is not None:
                yield bundle_pb2.FetchResponse(data=chunk)
        finally:
            chunks.close()  # type: ignore[attr-defined]


async def _shielded(call: Any, *arguments: Any) -> Any:
    """Run a call on a thread. A cancelled caller still waits for the call's end, because the thread uses its file."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


class Upload:
    """One client's stream of files. `close` ends it, even within a file. Methods block, so call them on a thread."""

    def __init__(self, store: BlobStore):
        self._store = store
        self._file: IO[bytes] | None = None
        self._sha256, self._size, self._position, self._begun_at = "", 0, 0, 0
        self.num_blobs = 0

    def take(self, sha256: str, size: int, offset: int, data: bytes) -> None:
        """Add a part, and complete the file after its last part. A part of a file that the store already has is
        ignored. Raises InvalidInput for a part that does not follow the previous part, for a wrong digest, and for a
        file that is too large; Busy if the quota is too small; Conflict if the client has to request the list of
        missing files again."""
        if len(data) > CHUNK_BYTES:
            raise InvalidInput(f"a part has {len(data)} bytes, but at most {CHUNK_BYTES} are allowed")
        if self._file is None or sha256 != self._sha256:
            self.finish()
            if self._store.has(sha256):  # another client has sent it in the meantime
                return
            file = self._begin(sha256, size, offset)
        else:
            file = self._file
        if size != self._size or offset != self._position or offset + len(data) > size:
            raise InvalidInput(
                f"file {sha256[:12]}…: this part begins at byte {offset} of {size}; the next part has to begin at byte "
                f"{self._position} of {self._size}, and to end within the file"
            )
        file.write(data)
        self._position += len(data)
        if self._position == self._size:
            file.close()
            self._complete()

    def _begin(self, sha256: str, size: int, offset: int) -> IO[bytes]:
        self._store.begin(sha256, size, offset)
        self._sha256, self._size, self._position, self._begun_at = sha256, size, offset, offset
        try:
            self._file = self._store.open_partial(sha256)
        except BaseException:
            self.close()
            raise
        return self._file

    def _complete(self) -> None:
        try:
            self._store.complete(self._sha256, self._size)
        except InvalidInput as fault:
            if self._begun_at:  # the part that was here before may be what is damaged
                raise Conflict(f"{fault}; request the list of missing files again") from None
            raise
        finally:
            self.close()
        self.num_blobs += 1

    def finish(self) -> None:
        """Raise Conflict if the last file is incomplete."""
        if self._file is not None:
            raise Conflict(
                f"the file {self._sha256[:12]}… ended at byte {self._position} of {self._size}; request the list of missing files again"
            )

    def close(self) -> None:
        """Keep the received part of an incomplete file, so that a later stream can continue it."""
        if self._sha256:
            with contextlib.suppress(OSError):  # if the disk refuses the last bytes, a later stream sends them again
                if self._file is not None:
                    self._file.close()
            self._store.end(self._sha256)
        self._file, self._sha256 = None, ""
