"""Reading weights from the object store: deltas on top of the held version, or a snapshot and the deltas after it.

Promise: the tensors that `fetch` returns are the learner's, bit for bit. Every object has the digest that its manifest
names, the manifests are chained to the one digest that came over the control plane, and the checksum of every changed
chunk is compared before the tensors are returned. An object that is damaged, truncated or of another base is refused,
named in the log, and replaced by reading the snapshot.

One copy of the weights stays in host memory, because a delta needs the bits that it changes. It is changed in place, chunk
by chunk, in several threads; a copy that an error has left half changed is dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from paceline.errors import NotFound, PacelineError, WireError
from paceline.groups import Version
from paceline.host.memory import usable_cores
from paceline.rollout.weights.held_weights import HeldWeights
from paceline.rollout.weights.part_fetcher import PartFetcher
from paceline.rollout.weights.tensor_part import TensorPart
from paceline.weights import delta_codec
from paceline.weights.object_store import Buffer, WeightStore
from paceline.weights.offers import StoreOffer
from paceline.weights.part_file import ChunkNote
from paceline.weights.store_format import StoredObject, StoredVersion

log = logging.getLogger(__name__)

LONGEST_CHAIN = 4096
PARTS_IN_HAND = 4
"""Parts whose chunks are decoded at a time."""
MOST_THREADS = 24


class Damaged(WireError):
    """The store can be read, but its files do not give the version: a snapshot has to be written."""


class StoreReader:
    """Reader of one run, with the last weights that it has read. Used by one thread, which has `threads` helpers.

    With `part` it fetches the chunks that the part needs, and `fetch` returns that range of each tensor.
    """

    def __init__(
        self, store: WeightStore, run_id: str, part: TensorPart | None = None, threads: int | None = None
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._part = part
        self._fetcher = PartFetcher(store, run_id, in_part=part is not None)
        self._held: HeldWeights | None = None
        count = threads or min(MOST_THREADS, max(1, usable_cores() * 3 // 4))
        self._helpers = ThreadPoolExecutor(count, thread_name_prefix="weights-decode")

    @property
    def read_bytes(self) -> int:
        """Bytes read from the store so far."""
        return self._fetcher.read_bytes

    @property
    def held(self) -> Version | None:
        """The version on which a delta can build; None without one."""
        return self._held.version if self._held is not None else None

    def close(self) -> None:
        """End the helpers, without waiting."""
        self._helpers.shutdown(wait=False, cancel_futures=True)
        self._fetcher.close()

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
        self._held = held = HeldWeights(snapshot, self._part)
        filling = _Chunks(self._helpers)
        for rank, chunks in self._fetcher.parts(snapshot, held):
            filling.add(self._fill, held, rank, chunks)
        filling.end()
        held.check_complete()
        _check_contents(held, snapshot)
        return self._apply(deltas[::-1])

    # Reading and applying

    def _apply(self, deltas: list[StoredVersion]) -> dict[str, torch.Tensor]:
        """Apply deltas to the held version, oldest first, and compare every chunk that they have changed."""
        held = self._held
        assert held is not None
        unchecked: set[tuple[int, int]] = set()
        try:
            for manifest in deltas:
                held.version = manifest.version
                change = self._change_and_check if manifest is deltas[-1] else self._change
                changing = _Chunks(self._helpers)
                for rank, chunks in self._fetcher.parts(manifest, held):
                    changed = {(rank, note.chunk) for note, _ in chunks}
                    unchecked = unchecked - changed if manifest is deltas[-1] else unchecked | changed
                    changing.add(change, held, rank, chunks)
                changing.end()
            for rank, chunk in sorted(unchecked):
                held.check(rank, chunk, held.read(rank, chunk)[0])
            if deltas:
                _check_contents(held, deltas[-1])
        except BaseException:
            self._held = None
            raise
        return held.tensors

    # In the helpers' threads

    def _fill(self, held: HeldWeights, rank: int, note: ChunkNote, data: Buffer) -> None:
        bits_N = np.frombuffer(data, f"u{held.layouts[rank].width(note.chunk)}")
        held.check(rank, note.chunk, bits_N)
        held.write(rank, note.chunk, bits_N)

    def _change(
        self, held: HeldWeights, rank: int, note: ChunkNote, data: Buffer, must_check: bool = False
    ) -> None:
        bits_N, in_place = held.read(rank, note.chunk)
        positions_K, values_K = delta_codec.decode(data, bits_N)
        bits_N[positions_K] = values_K
        if not in_place:
            held.write(rank, note.chunk, bits_N)
        if must_check:
            held.check(rank, note.chunk, bits_N)

    def _change_and_check(self, held: HeldWeights, rank: int, note: ChunkNote, data: Buffer) -> None:
        self._change(held, rank, note, data, must_check=True)

    def _manifest(self, offer: StoreOffer, stored: StoredObject, version: Version) -> StoredVersion:
        data = self._fetcher.whole(stored, offer.algorithm)
        manifest = StoredVersion.from_bytes(data)
        found = (manifest.run_id, manifest.version, manifest.algorithm)
        if found != (offer.run_id, version, offer.algorithm) or offer.run_id != self._run_id:
            raise WireError(f"{stored.name} is of {found}, not of {(offer.run_id, version, offer.algorithm)}")
        return manifest


class _Chunks:
    """Work on the chunks of several parts at a time."""

    def __init__(self, helpers: ThreadPoolExecutor) -> None:
        self._helpers = helpers
        self._parts: deque[list[Future[None]]] = deque()

    def add(
        self,
        work: Callable[[HeldWeights, int, ChunkNote, Buffer], None],
        held: HeldWeights,
        rank: int,
        chunks: Iterable[tuple[ChunkNote, Buffer]],
    ) -> None:
        """Begin to work on the chunks of a part. Raises what the work on an earlier part has raised."""
        while len(self._parts) >= PARTS_IN_HAND:
            self._wait()
        self._parts.append([self._helpers.submit(work, held, rank, note, data) for note, data in chunks])

    def end(self) -> None:
        """Wait for everything. Raises the first error."""
        while self._parts:
            self._wait()

    def _wait(self) -> None:
        for future in self._parts.popleft():
            future.result()


def _check_contents(held: HeldWeights, manifest: StoredVersion) -> None:
    if held.contents() != manifest.contents:
        raise WireError(f"version {tuple(manifest.version)} has other contents than its manifest")
