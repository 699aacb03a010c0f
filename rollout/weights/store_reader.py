"""Reading weights from the object store: deltas on top of the held version, or a snapshot and the deltas after it.

Promise: the tensors that `fetch` returns are the learner's, bit for bit. Every object has the digest that its manifest
names, the manifests are chained to the one digest that came over the control plane, and the checksum of every changed
slice is compared before the tensors are returned. An object that is damaged, truncated or of another base is refused,
named in the log, and replaced by reading the snapshot.

One copy of the weights stays in host memory, because a delta needs the bits that it changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import NotFound, PacelineError, WireError
from paceline.groups import Version
from paceline.weights.delta_codec import decode
from paceline.weights.manifest import Algorithm, TensorPlan, WeightManifest, checksum
from paceline.weights.object_store import Buffer, WeightStore
from paceline.weights.offers import StoreOffer
from paceline.weights.packing import empty_flat, views
from paceline.weights.store_format import (
    PartHeader,
    Slice,
    StoredObject,
    StoredVersion,
    content_hash,
    element_bytes,
    num_elements,
    read_part,
)

log = logging.getLogger(__name__)

LONGEST_CHAIN = 4096


class Damaged(WireError):
    """The store can be read, but its files do not give the version: a snapshot has to be written."""


class StoreReader:
    """Reader of one run, with the last weights that it has read. Used by one thread."""

    def __init__(self, store: WeightStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._held: _Held | None = None
        self.read_bytes = 0
        """Bytes read from the store so far."""

    @property
    def held(self) -> Version | None:
        """The version on which a delta can build; None without one."""
        return self._held.version if self._held is not None else None

    def fetch(self, offer: StoreOffer) -> dict[str, torch.Tensor]:
        """Return the tensors of the offered version, which belong to this object and are valid until the next call.

        Raises NotFound or Unavailable when the store cannot be read, Damaged when it can but a part is damaged.
        """
        target = self._manifest(offer, offer.manifest, offer.version)
        try:
            deltas = self._deltas_after_held(offer, target)
            if deltas is not None:
                return self._apply(deltas)
        except (WireError, NotFound) as error:
            log.warning("weights %s: %s; reading the snapshot", tuple(offer.version), error)
        # A copy that was changed in part is dropped.
        self._held = None
        try:
            return self._from_snapshot(offer, target)
        except (WireError, NotFound) as error:
            self._held = None
            raise Damaged(f"{self._store.url}: {error}") from error
        except PacelineError:
            self._held = None
            raise

    # Selection of what is read

    def _deltas_after_held(self, offer: StoreOffer, target: StoredVersion) -> list[StoredVersion] | None:
        """Return the deltas from the held version to the target, oldest first; None when a snapshot has fewer bytes."""
        held = self._held
        if held is None:
            return None
        deltas: list[StoredVersion] = []
        size_bytes, manifest = 0, target
        while manifest.version > held.version:
            if manifest.base is None or manifest.base_version is None:
                return None
            deltas.append(manifest)
            size_bytes += manifest.size_bytes
            if size_bytes > offer.snapshot_bytes or len(deltas) > LONGEST_CHAIN:
                return None
            if manifest.base_version == held.version:
                break
            manifest = self._manifest(offer, manifest.base, manifest.base_version)
        if not deltas or deltas[-1].base_version != held.version:
            return None
        if deltas[-1].base_contents != held.contents():
            raise WireError(f"the delta to {tuple(deltas[-1].version)} is for another base than the one held")
        return deltas[::-1]

    def _from_snapshot(self, offer: StoreOffer, target: StoredVersion) -> dict[str, torch.Tensor]:
        snapshot = self._manifest(offer, offer.snapshot, offer.snapshot_version)
        if snapshot.kind != "anchor":
            raise WireError(f"{offer.snapshot.name} is no snapshot")
        deltas: list[StoredVersion] = []
        manifest = target
        while manifest.version > snapshot.version:
            if manifest.base is None or manifest.base_version is None or len(deltas) > LONGEST_CHAIN:
                raise WireError(f"no deltas lead from {tuple(snapshot.version)} to {tuple(target.version)}")
            deltas.append(manifest)
            if manifest.base_version <= snapshot.version:
                break
            manifest = self._manifest(offer, manifest.base, manifest.base_version)
        if deltas and (deltas[-1].base_version, deltas[-1].base_contents) != (
            snapshot.version,
            snapshot.contents,
        ):
            raise WireError(
                f"the delta to {tuple(deltas[-1].version)} is for another base than {offer.snapshot.name}"
            )
        if not deltas and target.contents != snapshot.contents:
            raise WireError(f"{offer.snapshot.name} has other contents than {offer.manifest.name}")
        self._held = held = _Held(snapshot)
        for rank, part in enumerate(snapshot.parts):
            header, tensors = self._part(snapshot, rank, part)
            held.fill(rank, header.slices, tensors)
        held.check_complete()
        held.check(snapshot, held.all_slices())
        return self._apply(deltas[::-1]) if deltas else held.tensors

    # Reading and applying

    def _apply(self, deltas: list[StoredVersion]) -> dict[str, torch.Tensor]:
        """Apply deltas to the held version, and compare every slice that they have changed."""
        held = self._held
        assert held is not None
        touched: dict[tuple[int, str], Slice] = {}
        try:
            for manifest in deltas:
                # A whole version is decoded against its base before its first element is written.
                overwrites = []
                for rank, stored in enumerate(manifest.parts):
                    header, payloads = self._part(manifest, rank, stored)
                    for piece in header.slices:
                        bits = held.slice_bits(rank, piece)
                        payload = payloads.get(piece.name)
                        if payload is None:
                            raise WireError(f"{stored.name} has no tensor {piece.name!r}")
                        overwrites.append((bits, *decode(bytes(payload), bits)))
                        touched[rank, piece.name] = piece
                for bits, positions_K, values_K in overwrites:
                    bits[positions_K] = values_K
                for (rank, name), piece in touched.items():
                    held.tables[rank][name] = piece
                held.version = manifest.version
            held.check(deltas[-1], touched.items())
        except BaseException:
            self._held = None
            raise
        return held.tensors

    def _manifest(self, offer: StoreOffer, stored: StoredObject, version: Version) -> StoredVersion:
        data = self._read(stored, offer.algorithm)
        manifest = StoredVersion.from_bytes(data)
        found = (manifest.run_id, manifest.version, manifest.algorithm)
        if found != (offer.run_id, version, offer.algorithm) or offer.run_id != self._run_id:
            raise WireError(f"{stored.name} is of {found}, not of {(offer.run_id, version, offer.algorithm)}")
        return manifest

    def _part(
        self, manifest: StoredVersion, rank: int, stored: StoredObject
    ) -> tuple[PartHeader, dict[str, memoryview]]:
        header, tensors = read_part(self._read(stored, manifest.algorithm))
        found = (header.kind, header.run_id, header.version, header.base, header.rank, header.algorithm)
        wanted = (
            manifest.kind,
            self._run_id,
            manifest.version,
            manifest.base_version,
            rank,
            manifest.algorithm,
        )
        if found != wanted:
            raise WireError(f"{stored.name} says that it is {found}, its manifest {wanted}")
        return header, tensors

    def _read(self, stored: StoredObject, algorithm: Algorithm) -> Buffer:
        data = self._store.read(stored.name, stored.size_bytes)
        self.read_bytes += len(data)
        if len(data) != stored.size_bytes:
            raise WireError(f"{stored.name} has {len(data)} bytes, not {stored.size_bytes}")
        digest = checksum(data, algorithm)
        if digest != stored.digest:
            raise WireError(f"{stored.name} has {algorithm} {digest}, not {stored.digest}")
        return data


class _Held:
    """The whole model in host memory, and the checksum of every slice of it."""

    def __init__(self, snapshot: StoredVersion) -> None:
        self.version = snapshot.version
        self._algorithm: Algorithm = snapshot.algorithm
        self._plans: dict[str, TensorPlan] = {plan.name: plan for plan in snapshot.tensors}
        try:
            layout = WeightManifest.plan(snapshot.tensors, bucket_bytes=1 << 28)
        except (ValueError, KeyError) as error:
            raise WireError(f"snapshot of {tuple(snapshot.version)}: {error}") from error
        flat = empty_flat(layout)
        self.tensors: dict[str, torch.Tensor] = views(flat, layout)
        self._bits: dict[str, npt.NDArray[Any]] = {}
        raw = flat.numpy()
        for entry in layout.entries:
            plan = self._plans[entry.name]
            if plan.same_as is None:
                place = raw[entry.offset : entry.offset + entry.num_bytes]
                self._bits[entry.name] = place.view(f"u{element_bytes(plan)}")
        self.tables: list[dict[str, Slice]] = [{} for _ in snapshot.parts]

    def contents(self) -> tuple[str, ...]:
        """Return the hash over all slices of each rank."""
        return tuple(content_hash(table.values()) for table in self.tables)

    def slice_bits(self, rank: int, piece: Slice) -> npt.NDArray[Any]:
        """Return [N] the bits of a slice, to read and write. Raises WireError for one that the snapshot does not have."""
        expected = self.tables[rank].get(piece.name) if rank < len(self.tables) else None
        if expected is None or (expected.start, expected.length) != (piece.start, piece.length):
            raise WireError(
                f"slice {piece.name!r} [{piece.start}, +{piece.length}) of rank {rank} is not in the snapshot"
            )
        return self._bits[piece.name][piece.start : piece.start + piece.length]

    def fill(self, rank: int, slices: Iterable[Slice], data: Mapping[str, memoryview]) -> None:
        """Copy one rank's part of a snapshot. Raises WireError."""
        for piece in slices:
            bits = self._bits.get(piece.name)
            if bits is None or piece.name not in data or piece.start + piece.length > len(bits):
                raise WireError(
                    f"the snapshot's slice {piece.name!r} [{piece.start}, +{piece.length}) has no place"
                )
            place = bits[piece.start : piece.start + piece.length].view(np.uint8)
            if len(data[piece.name]) != len(place):
                raise WireError(
                    f"the snapshot's slice {piece.name!r} has {len(data[piece.name])} bytes, not {len(place)}"
                )
            place[:] = np.frombuffer(data[piece.name], np.uint8)
            self.tables[rank][piece.name] = piece

    def check_complete(self) -> None:
        """Raise WireError unless the slices of all ranks are every element of every tensor, once."""
        for name, bits in self._bits.items():
            end = 0
            for piece in sorted(
                (table[name] for table in self.tables if name in table), key=lambda s: s.start
            ):
                if piece.start != end:
                    break
                end += piece.length
            if end != len(bits) or end != num_elements(self._plans[name]):
                raise WireError(f"the snapshot's parts have {end} of {len(bits)} elements of {name!r}")

    def all_slices(self) -> list[tuple[tuple[int, str], Slice]]:
        """Return every slice by rank and name."""
        return [
            ((rank, name), piece) for rank, table in enumerate(self.tables) for name, piece in table.items()
        ]

    def check(self, manifest: StoredVersion, slices: Iterable[tuple[tuple[int, str], Slice]]) -> None:
        """Raise WireError unless these slices have their checksums, and all slices the manifest's contents."""
        for (rank, name), piece in slices:
            digest = checksum(self.slice_bits(rank, piece).view(np.uint8), self._algorithm)
            if digest != piece.checksum:
                raise WireError(
                    f"version {tuple(manifest.version)}: slice {name!r} of rank {rank} comes to {self._algorithm} "
                    f"{digest}, the learner has {piece.checksum}"
                )
        if self.contents() != manifest.contents:
            raise WireError(f"version {tuple(manifest.version)} has other contents than its manifest")
