"""The control plane's BundleService: clients send the files that runs need, workers fetch them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from paceline.bundle.manifest import MAX_FILES
from paceline.errors import InvalidInput, Unavailable
from paceline.services.common.grpc_server import with_status, with_stream_status
from paceline.services.coordinator.blobs.store import BlobStore
from paceline.services.coordinator.blobs.upload import Upload
from paceline.v1 import bundle_pb2, bundle_pb2_grpc

PART_WAIT_S = 60.0
"""Seconds to wait for the next part of a file; what has come stays."""
Context = grpc.aio.ServicerContext[Any, Any]


class BundleServicer(bundle_pb2_grpc.BundleServiceServicer):
    """Files of one store."""

    def __init__(self, store: BlobStore):
        self._store = store

    @with_status
    async def Missing(
        self, request: bundle_pb2.MissingRequest, context: Context
    ) -> bundle_pb2.MissingResponse:
        if len(request.blobs) > MAX_FILES + 1:
            raise InvalidInput(f"{len(request.blobs)} files are more than the {MAX_FILES} of a bundle")
        return await asyncio.to_thread(self._missing, request)

    def _missing(self, request: bundle_pb2.MissingRequest) -> bundle_pb2.MissingResponse:
        response = bundle_pb2.MissingResponse()
        for blob in request.blobs:
            if not self._store.has(blob.sha256):
                response.missing.add(sha256=blob.sha256, offset=self._store.received(blob.sha256))
        return response

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
                    raise Unavailable(
                        f"no part of a file came for {PART_WAIT_S:g} s; send the rest again"
                    ) from None
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
    """Return the result of a call on a thread. A cancelled caller waits for its end, because the thread uses its file."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
