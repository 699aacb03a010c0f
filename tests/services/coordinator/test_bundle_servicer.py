"""Files of runs over gRPC: only what is missing, on from where it broke, whole and with its digest, or refused."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.bundle.collecting import Bundle
from paceline.bundle.manifest import BundledFile, Manifest
from paceline.calls.bundle_transfer import PART_BYTES, fetch, fetch_manifest, send
from paceline.errors import Busy, InvalidInput, NotFound, SpecError, Unavailable
from paceline.rate_limited_log import unforeseen
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.coordinator.blobs import BlobStore
from paceline.services.coordinator.bundle_servicer import BundleServicer
from paceline.v1 import bundle_pb2, bundle_pb2_grpc


def bundle_of(folder: Path, **files: bytes) -> Bundle:
    entries, sources = [], {}
    for name, data in files.items():
        sha256 = hashlib.sha256(data).hexdigest()
        entries.append(BundledFile(name, "code", len(data), sha256))
        sources[sha256] = folder / name
        (folder / name).write_bytes(data)
    return Bundle(Manifest.of(entries), sources)


class RecordingStore(BlobStore):
    """Notes the uploads that begin."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.begun: list[str] = []

    def begin(self, sha256: str, size: int, offset: int) -> None:
        self.begun.append(sha256)
        super().begin(sha256, size, offset)


class BreakingServicer(BundleServicer):
    """Ends the first stream after two parts, and notes the offsets of all parts of large files that it has taken."""

    def __init__(self, store: BlobStore, breaks_with: Unavailable | None):
        super().__init__(store)
        self.breaks_with = breaks_with
        self.offsets: list[int] = []
        self.has_broken = False

    async def Put(self, request_iterator: AsyncIterator[bundle_pb2.PutRequest], context: Any) -> Any:
        async def parts() -> AsyncIterator[bundle_pb2.PutRequest]:
            async for part in request_iterator:
                if len(self.offsets) == 2 and not self.has_broken:
                    self.has_broken = True
                    if self.breaks_with is None:
                        return  # as a client's stream that ends early: FAILED_PRECONDITION
                    raise self.breaks_with
                if part.size > PART_BYTES:
                    self.offsets.append(part.offset)
                yield part

        return await super().Put(parts(), context)


@asynccontextmanager
async def serving(store: BlobStore, servicer: BundleServicer | None = None) -> AsyncIterator[Callable[..., Any]]:
    """Yield a function that calls another one, with a channel to a server of the store, on a thread."""
    server = GrpcServer("127.0.0.1", 0)
    server.add(
        servicer or BundleServicer(store),
        bundle_pb2_grpc.add_BundleServiceServicer_to_server,
        "paceline.v1.BundleService",
    )
    await server.start()

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            return function(channel, *arguments)

    try:
        yield lambda *arguments: asyncio.to_thread(call, *arguments)
    finally:
        await server.stop(0.1)


def fetched(channel: grpc.Channel, sha256: str) -> bytes:
    return b"".join(fetch(channel, sha256, 1 << 30))


async def test_a_bundle_is_sent_once_and_fetched_by_digest(tmp_path: Path) -> None:
    large, store = bytes(range(256)) * (3 * PART_BYTES // 256 + 1), RecordingStore(tmp_path / "blobs")
    bundle = bundle_of(tmp_path, large=large, empty=b"", small=b"x")
    async with serving(store) as call:
        await call(send, bundle)
        assert await call(fetch_manifest, bundle.manifest.digest) == bundle.manifest
        for file in bundle.manifest.files:
            assert await call(fetched, file.sha256) == (tmp_path / file.path).read_bytes()
        await call(send, bundle)
        assert len(store.begun) == 4
        again = bundle_of(tmp_path, large=large, small=b"y")
        await call(send, again)
        assert store.begun[4:] == [hashlib.sha256(b"y").hexdigest(), again.manifest.digest]
        with pytest.raises(NotFound, match="paceline resume"):
            await call(fetched, "ab" * 32)


@pytest.mark.parametrize("error", [Unavailable("a break"), None], ids=["unavailable", "ended early"])
async def test_a_transfer_goes_on_where_it_broke(tmp_path: Path, error: Unavailable | None) -> None:
    store = BlobStore(tmp_path / "blobs")
    servicer, bundle = BreakingServicer(store, error), bundle_of(tmp_path, large=bytes(5 * PART_BYTES))
    async with serving(store, servicer) as call:
        await call(send, bundle)
    assert servicer.has_broken
    assert servicer.offsets == [number * PART_BYTES for number in range(5)]


async def test_a_fetch_goes_on_where_it_broke(tmp_path: Path) -> None:
    bundle, breaks = bundle_of(tmp_path, large=bytes(3 << 20)), [1]

    class BreakingStore(BlobStore):
        def read(self, sha256: str, offset: int = 0, length: int = 0) -> Iterator[bytes]:
            for chunk in super().read(sha256, offset, length):
                yield chunk
                if breaks and breaks.pop():
                    raise Unavailable("a break")

    async with serving(BreakingStore(tmp_path / "blobs")) as call:
        await call(send, bundle)
        assert await call(fetched, bundle.manifest.files[0].sha256) == bytes(3 << 20)
    assert breaks == []


async def test_one_request_at_a_time_verifies_files_even_after_its_client_has_left(tmp_path: Path) -> None:
    begun, release, running = threading.Event(), threading.Event(), [0, 0]

    class SlowStore(BlobStore):
        def missing(self, sizes: Mapping[str, int]) -> dict[str, int]:
            running[0] += 1
            running[1] = max(running)
            begun.set()
            assert release.wait(60)
            running[0] -= 1
            return {}

    servicer = BundleServicer(SlowStore(tmp_path))
    context: Any = None
    calls = [asyncio.ensure_future(servicer.Missing(bundle_pb2.MissingRequest(), context)) for _ in range(3)]
    assert await asyncio.to_thread(begun.wait, 20)
    calls[0].cancel()
    calls[1].cancel()
    for _ in range(9):
        await asyncio.sleep(0)
    assert [call.done() for call in calls] == [False, True, False]
    release.set()
    await asyncio.wait(calls)
    assert running == [0, 1]


async def test_what_the_coordinator_refuses_is_said(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, small=b"abc")
    async with serving(BlobStore(tmp_path / "a", max_blob_bytes=2)) as call:
        with pytest.raises(InvalidInput, match="give the data as a URL"):
            await call(send, bundle)
    async with serving(BlobStore(tmp_path / "b", quota_bytes=2)) as call:
        with pytest.raises(Busy, match="--bundle-quota-mb"):
            await call(send, bundle)
    async with serving(BlobStore(tmp_path / "c")) as call:
        (tmp_path / "small").write_bytes(b"abX")
        with pytest.raises(InvalidInput, match="changed during the transfer, or damaged"):
            await call(send, bundle)
        (tmp_path / "small").write_bytes(b"ab")
        with pytest.raises(SpecError, match="changed while it was sent"):
            await call(send, bundle)
        (tmp_path / "small").unlink()
        with pytest.raises(SpecError, match="cannot be read: No such file"):
            await call(send, bundle)
        with pytest.raises(SpecError, match="lost 'small'"):
            await call(send, Bundle(bundle.manifest, {}))


async def test_hostile_requests_are_refused(tmp_path: Path) -> None:
    def stub_call(channel: grpc.Channel, name: str, request: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            list(getattr(bundle_pb2_grpc.BundleServiceStub(channel), name)(request) or ())
        code: grpc.StatusCode = caught.value.code()
        return code

    hostile = bundle_pb2.MissingRequest(blobs=[bundle_pb2.BlobSize(sha256="../../x", size=1)])
    many = bundle_pb2.MissingRequest(blobs=[bundle_pb2.BlobSize(sha256="ab" * 32)] * 10_002)
    part = bundle_pb2.PutRequest(sha256="../../x", size=1, data=b"x")
    before, whole = unforeseen.total, hashlib.sha256(b"x").hexdigest()
    async with serving(BlobStore(tmp_path / "blobs")) as call:
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        assert await call(stub_call, "Missing", hostile) == invalid
        assert await call(stub_call, "Missing", many) == invalid
        assert await call(stub_call, "Put", iter([part])) == invalid
        assert await call(stub_call, "Fetch", bundle_pb2.FetchRequest(sha256="/etc/passwd")) == invalid
        short = bundle_pb2.PutRequest(sha256="ab" * 32, size=9, data=b"x")
        assert await call(stub_call, "Put", iter([short])) == grpc.StatusCode.FAILED_PRECONDITION
        beyond = bundle_pb2.PutRequest(sha256="cd" * 32, size=1, data=b"xy")
        assert await call(stub_call, "Put", iter([beyond])) == invalid
        for empty in (bundle_pb2.PutRequest(), bundle_pb2.PutRequest(size=1), bundle_pb2.PutRequest(data=b"x")):
            assert await call(stub_call, "Put", iter([empty])) == invalid
            first = bundle_pb2.PutRequest(sha256=whole, size=1, data=b"x")
            assert await call(stub_call, "Put", iter([first, empty])) == invalid
        for number in (1 << 31, 1 << 63, (1 << 64) - 1):
            huge = bundle_pb2.FetchRequest(sha256=whole, offset=number, length=number)
            assert await call(lambda c, r: list(bundle_pb2_grpc.BundleServiceStub(c).Fetch(r)), huge) == []
            part = bundle_pb2.PutRequest(sha256="ef" * 32, size=number, offset=number, data=b"x")
            assert await call(stub_call, "Put", iter([part])) in (invalid, grpc.StatusCode.FAILED_PRECONDITION)
    assert unforeseen.total == before


async def test_a_part_that_is_no_message_is_its_senders_fault(tmp_path: Path) -> None:
    def put(channel: grpc.Channel) -> grpc.RpcError:
        call = channel.stream_unary("/paceline.v1.BundleService/Put", lambda data: data, lambda data: data)
        with pytest.raises(grpc.RpcError) as refused:
            call(iter([b"\xff\xff"]))
        return refused.value

    before = unforeseen.total
    async with serving(BlobStore(tmp_path / "blobs")) as call:
        error = await call(put)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "PutRequest" in error.details()
    assert unforeseen.total == before


async def test_a_coordinator_that_is_away(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, small=b"abc")
    with (
        grpc.insecure_channel("127.0.0.1:1") as channel,
        pytest.raises(Unavailable, match="send the run's files"),
    ):
        await asyncio.to_thread(send, channel, bundle)
