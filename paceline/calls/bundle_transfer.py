"""Transfers bundles over gRPC: a submitter sends files that the coordinator lacks, a worker fetches files. A broken
transfer resumes at the offset that the coordinator names, or after the last byte received. The first call imports
gRPC."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bundle.allowed import refusal_of_bundle
from paceline.bundle.collecting import Bundle
from paceline.bundle.manifest import BundledFile, Kind, Manifest, localized
from paceline.calls.backoff import ExponentialBackoff, from_error
from paceline.errors import USUAL_S, Busy, InvalidInput, NotFound, PacelineError, SpecError, Unavailable, Unreadable
from paceline.host.regular_file import open_named
from paceline.spec import RunSpec

if TYPE_CHECKING:
    import grpc

    from paceline.files.bounded_cache import HeldFolder
    from paceline.v1.bundle_pb2 import PutRequest

PART_BYTES = 1 << 20
CALL_S = 60.0
TRANSFER_S = 3600.0
"""Longest duration of one stream, in seconds. A longer transfer continues in another stream."""
PATIENCE_S = 60.0
"""Seconds without progress after which a transfer fails."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "FAILED_PRECONDITION")
"""Names of gRPC statuses after which a transfer resumes."""


def send(channel: grpc.Channel, bundle: Bundle, wait_s: float = 0.0, patience_s: float = PATIENCE_S) -> None:
    """Send the files that the coordinator lacks, then the manifest. Raises SpecError if a file was changed meanwhile;
    InvalidInput, with the coordinator's reason, if the coordinator refuses a file; Busy if the coordinator has no
    room; Unavailable if the coordinator does not answer for `wait_s` at first, or for `patience_s` later."""
    import grpc

    backoff, progress, progress_s = ExponentialBackoff(FIRST_PAUSE_S, MAX_PAUSE_S), 0, time.monotonic()
    while True:
        try:
            missing = _missing(channel, bundle)
            if not missing:
                return
            came = sum(offset for _, offset in missing) - 2**40 * len(missing)
            if came != progress:
                progress, progress_s = came, time.monotonic()
                backoff.reset()
            _put(channel, bundle, missing)
        except grpc.RpcError as error:
            silent_s = time.monotonic() - progress_s
            if error.code().name not in PASSING or silent_s >= (patience_s if progress else wait_s):
                raise _translated(error, "send the run's files") from None
            time.sleep(backoff.next_s())


def _missing(channel: grpc.Channel, bundle: Bundle) -> list[tuple[str, int]]:
    """Return the digest of each file that the coordinator lacks, with the offset to send from; the manifest is last."""
    from paceline.v1 import bundle_pb2, bundle_pb2_grpc

    manifest = bundle.manifest
    request = bundle_pb2.MissingRequest()
    for sha256, size in {file.sha256: file.size for file in manifest.files}.items():
        request.blobs.add(sha256=sha256, size=size)
    request.blobs.add(sha256=manifest.digest, size=len(manifest.text))
    response = bundle_pb2_grpc.BundleServiceStub(channel).Missing(request, timeout=CALL_S)
    return [(blob.sha256, blob.offset) for blob in response.missing]


def _put(channel: grpc.Channel, bundle: Bundle, missing: list[tuple[str, int]]) -> None:
    from paceline.v1 import bundle_pb2_grpc

    failed: list[PacelineError] = []

    def parts() -> Iterator[PutRequest]:
        try:
            for sha256, offset in missing:
                yield from _parts(bundle, sha256, offset)
        except PacelineError as error:  # gRPC would report only that the stream's iterator failed
            failed.append(error)

    try:
        bundle_pb2_grpc.BundleServiceStub(channel).Put(parts(), timeout=TRANSFER_S)
    finally:
        if failed:
            raise failed[0]


def _parts(bundle: Bundle, sha256: str, offset: int) -> Iterator[PutRequest]:
    """Yield a file in parts from `offset` on, at least one. Raises SpecError if the file is unreadable or has another
    size."""
    from paceline.v1.bundle_pb2 import PutRequest

    if sha256 == bundle.manifest.digest:
        text = bundle.manifest.text
        for start in range(offset, max(len(text), offset + 1), PART_BYTES):
            yield PutRequest(sha256=sha256, size=len(text), offset=start, data=text[start : start + PART_BYTES])
        return
    file = next(file for file in bundle.manifest.files if file.sha256 == sha256)
    path = bundle.sources.get(sha256)
    if path is None:
        raise SpecError(
            f"the coordinator has lost {file.path!r} of the run's bundle, and this machine lacks it; submit the run again"
        )
    try:
        with open_named(path) as source:
            source.seek(offset)
            sent = False
            while (data := source.read(min(PART_BYTES, file.size - offset))) or not sent:
                yield PutRequest(sha256=sha256, size=file.size, offset=offset, data=data)
                offset, sent = offset + len(data), True
    except OSError as error:
        raise SpecError(f"{str(path)!r} cannot be read: {error.strerror}; submit again") from None
    if offset < file.size:
        raise SpecError(f"{str(path)!r} was changed while it was sent; submit again")


def fetch(channel: grpc.Channel, sha256: str, size: int, patience_s: float = PATIENCE_S) -> Iterator[bytes]:
    """Yield a file's content, over several streams. Raises NotFound; Unavailable after `patience_s` without a byte."""
    import grpc

    from paceline.v1 import bundle_pb2, bundle_pb2_grpc

    stub, offset = bundle_pb2_grpc.BundleServiceStub(channel), 0
    backoff, progress_s = ExponentialBackoff(FIRST_PAUSE_S, MAX_PAUSE_S), time.monotonic()
    while True:
        try:
            request = bundle_pb2.FetchRequest(sha256=sha256, offset=offset)
            for response in stub.Fetch(request, timeout=TRANSFER_S):
                offset, progress_s = offset + len(response.data), time.monotonic()
                backoff.reset()
                yield response.data
            return
        except grpc.RpcError as error:
            if error.code().name not in PASSING or time.monotonic() - progress_s > patience_s:
                raise _translated(error, "fetch the run's files") from None
            if offset > size:
                return
            time.sleep(backoff.next_s())


def fetch_manifest(channel: grpc.Channel, digest: str) -> Manifest:
    """Return a bundle's manifest. Raises NotFound, Unavailable; Unreadable if the manifest's digest is another."""
    text = b"".join(fetch(channel, digest, 0))
    manifest = Manifest.read(text)
    if manifest.digest != digest:
        raise Unreadable(f"the manifest of bundle {digest[:12]}… arrived damaged; retry")
    return manifest


def unpacked_spec(
    channel: grpc.Channel, spec: RunSpec, digest: str, *kinds: Kind, allowed: Sequence[Path] = ()
) -> tuple[RunSpec, HeldFolder]:
    """Unpack the bundle's files of these kinds into a folder in this user's cache. Return the spec with the paths of
    the unpacked files, and the folder. The caller closes the folder. `allowed` are the folders of `--functions-from`.
    Raises Unreadable for a damaged or missing file and for code that is not allowed; Unavailable; InvalidInput for a
    malformed manifest."""
    from paceline.bundle.cache import BundleCache

    def content(file: BundledFile) -> Iterator[bytes]:
        return fetch(channel, file.sha256, file.size)

    try:
        manifest = fetch_manifest(channel, digest).subset(*kinds)
        if why := refusal_of_bundle(spec, manifest, allowed):
            raise Unreadable(f"this worker does not run the functions: {why}")
        unpacked = BundleCache.of_user().open(manifest, content)
    except NotFound as error:
        raise Unreadable(str(error)) from None
    return localized(spec, manifest, unpacked.root), unpacked


def _translated(error: Any, doing: str) -> PacelineError:
    status, details = error.code().name, error.details() or ""
    if status == "NOT_FOUND":
        return NotFound(details)
    if status == "RESOURCE_EXHAUSTED":
        return Busy(details, from_error(error) or USUAL_S)
    if status in PASSING:
        return Unavailable(f"the coordinator does not answer a request to {doing}: {details or status}")
    return InvalidInput(details or f"the coordinator refuses to {doing}: {status}")
