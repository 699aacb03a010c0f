"""The message that offers a version of the weights in the object store to one member."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import WireError
from paceline.groups import Version
from paceline.v1 import worker_pb2
from paceline.weights.format.manifest import Algorithm, algorithm_named
from paceline.weights.store.store_format import StoredObject, checked_object


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
        message = worker_pb2.WeightOffer(
            run_id=self.run_id, epoch=self.epoch, member_id=self.member_id, max_wait_s=max_wait_s
        )
        message.version.session, message.version.step = self.version
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


def _object_message(stored: StoredObject) -> worker_pb2.StoredObject:
    return worker_pb2.StoredObject(name=stored.name, size_bytes=stored.size_bytes, digest=stored.digest)


def _object(message: worker_pb2.StoredObject) -> StoredObject:
    try:
        return checked_object(message.name, message.size_bytes, message.digest)
    except ValueError as error:
        raise WireError(f"the offer cannot be right: {error}") from None
