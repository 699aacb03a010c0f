"""The messages that offer a version of the weights to one member: over a link, or from the store."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import WireError
from paceline.groups import Version
from paceline.weights.manifest import MAX_NAME_CHARACTERS, Algorithm, algorithm_named
from paceline.weights.store_format import StoredObject, checked_object
from protos.paceline.v1 import worker_pb2


@dataclass(frozen=True)
class LinkOffer:
    """ "Version (session, step) is ready for you": sent to one member over the control plane.

    It serves forming and transferring. A member without a link of this prefix forms it first, at the store, as rank 1
    of 2; then it receives what the manifest lists. A later attempt has another prefix and replaces the earlier.
    """

    run_id: str
    epoch: int
    member_id: str
    attempt: int
    backend: str
    """`gloo` or `shared`."""
    store_host: str
    store_port: int
    prefix: str
    session: int
    step: int
    manifest: bytes
    """`WeightManifest.to_bytes()`."""

    @property
    def version(self) -> Version:
        """The policy version that is offered."""
        return Version(self.session, self.step)

    def check(self) -> None:
        """Raises WireError for an offer whose link no learner of this version makes."""
        if self.backend not in ("gloo", "shared"):
            raise WireError(
                f"a link over {self.backend[:80]!r} was offered; this worker has 'gloo' and 'shared'"
            )
        if not 0 < self.store_port < 65536:
            raise WireError(f"the offer names port {self.store_port}")
        for what, text in (("host", self.store_host), ("prefix", self.prefix)):
            if not 0 < len(text) <= MAX_NAME_CHARACTERS or not text.isprintable() or " " in text:
                raise WireError(f"the offer names the {what} {text[:80]!r}")

    def to_proto(self, max_wait_s: float) -> worker_pb2.WeightOffer:
        """The message; `max_wait_s` is the longest silence that the learner allows."""
        message = _message(self.run_id, self.epoch, self.member_id, self.version, max_wait_s)
        message.attempt = self.attempt
        message.backend = self.backend
        message.store_host = self.store_host
        message.store_port = self.store_port
        message.prefix = self.prefix
        message.manifest = self.manifest
        return message

    @classmethod
    def from_proto(cls, message: worker_pb2.WeightOffer) -> LinkOffer:
        """Reads the message as it is; `check` judges it."""
        return cls(
            run_id=message.run_id,
            epoch=message.epoch,
            member_id=message.member_id,
            attempt=message.attempt,
            backend=message.backend,
            store_host=message.store_host,
            store_port=message.store_port,
            prefix=message.prefix,
            session=message.version.session,
            step=message.version.step,
            manifest=message.manifest,
        )


@dataclass(frozen=True)
class StoreOffer:
    """Offer of a version in the object store to one member. The control plane that carries it authenticates it."""

    run_id: str
    epoch: int
    member_id: str
    version: Version
    url: str
    algorithm: Algorithm
    manifest: StoredObject
    """Manifest of the version; its digest authenticates everything else."""
    snapshot_version: Version
    """The newest snapshot before or at the version."""
    snapshot: StoredObject
    """Its manifest."""
    snapshot_bytes: int
    """Size of its parts."""

    def to_proto(self, max_wait_s: float) -> worker_pb2.WeightOffer:
        """The message; `max_wait_s` is the longest silence that the learner allows."""
        message = _message(self.run_id, self.epoch, self.member_id, self.version, max_wait_s)
        stored = message.stored
        stored.url, stored.algorithm = self.url, self.algorithm
        stored.manifest.CopyFrom(_object_message(self.manifest))
        stored.anchor_version.session, stored.anchor_version.step = self.snapshot_version
        stored.anchor.CopyFrom(_object_message(self.snapshot))
        stored.anchor_bytes = self.snapshot_bytes
        return message

    @classmethod
    def from_proto(cls, message: worker_pb2.WeightOffer) -> StoreOffer:
        """Reads the message. Raises WireError for an unknown algorithm and for an impossible object."""
        stored = message.stored
        return cls(
            run_id=message.run_id,
            epoch=message.epoch,
            member_id=message.member_id,
            version=Version(message.version.session, message.version.step),
            url=stored.url,
            algorithm=algorithm_named(stored.algorithm),
            manifest=_object(stored.manifest),
            snapshot_version=Version(stored.anchor_version.session, stored.anchor_version.step),
            snapshot=_object(stored.anchor),
            snapshot_bytes=stored.anchor_bytes,
        )


def _message(
    run_id: str, epoch: int, member_id: str, version: Version, max_wait_s: float
) -> worker_pb2.WeightOffer:
    message = worker_pb2.WeightOffer(run_id=run_id, epoch=epoch, member_id=member_id, max_wait_s=max_wait_s)
    message.version.session, message.version.step = version
    return message


def _object_message(stored: StoredObject) -> worker_pb2.StoredObject:
    return worker_pb2.StoredObject(name=stored.name, size_bytes=stored.size_bytes, digest=stored.digest)


def _object(message: worker_pb2.StoredObject) -> StoredObject:
    try:
        return checked_object(message.name, message.size_bytes, message.digest)
    except ValueError as error:
        raise WireError(f"the offer cannot be right: {error}") from None
