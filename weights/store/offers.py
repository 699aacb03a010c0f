"""Records a session's versions in the object store, and offers them to the members. Runs on rank 0 of the learner.

A member costs only an offer and its answer: it reads at its pace, and may skip versions. An offer without an answer is
repeated after `max_wait_s` of silence. The repetition is harmless: a member that is reading goes on, and a member that
holds the version says so. A refused offer is repeated after a growing pause. One thread waits for a new version, an
answer, a change of members, or the time of the next offer. No other thread waits for this thread. One condition guards
the state.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.calls.backoff import pause_after
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.weights.format.manifest import Algorithm
from paceline.weights.progress import PublishResult
from paceline.weights.store.store_format import StoredObject, StoredVersion, StoreOffer

SNAPSHOTS_KEPT = 2
"""Number of chains that are never pruned: the newest, and the one before, which a joining member may be reading."""


@dataclass(frozen=True)
class Stored:
    """A version that is complete in the store, with the newest snapshot up to it."""

    version: Version
    manifest: StoredObject
    snapshot_version: Version
    snapshot: StoredObject
    """The snapshot's manifest."""
    snapshot_bytes: int
    """Size of the snapshot's parts in bytes."""
    size_bytes: int
    """Bytes that a member with the previous version has to read."""
    seconds: float


class Chain:
    """Deltas and snapshots of one session. `oldest_held` returns the slowest member's version (None: no member needs an
    old one). Promise: `prune` returns no version that the slowest member must still read, and none of the newest
    chains."""

    def __init__(self, anchor_interval: int, oldest_held: Callable[[], Version | None]) -> None:
        self._anchor_interval = anchor_interval
        self._oldest_held = oldest_held
        self._objects: dict[Version, list[str]] = {}
        self._snapshots: list[tuple[Version, StoredObject, int]] = []
        self._since_snapshot: list[int] = []
        self.newest: StoredObject | None = None
        self.newest_version: Version | None = None
        self.contents: tuple[str, ...] = ()

    def add_delta(self, manifest: StoredVersion, stored: StoredObject) -> None:
        """Add the delta whose manifest is in the store as `stored`."""
        self._add(manifest, stored)
        self._since_snapshot.append(manifest.size_bytes)
        self.newest, self.newest_version, self.contents = stored, manifest.version, manifest.contents

    def add_snapshot(self, manifest: StoredVersion, stored: StoredObject) -> None:
        """Add the snapshot whose manifest is in the store as `stored`."""
        self._add(manifest, stored)
        self._since_snapshot = []
        self._snapshots = [kept for kept in self._snapshots if kept[0] != manifest.version]
        self._snapshots.append((manifest.version, stored, manifest.size_bytes))
        if self.newest is None:  # the first of a session has no delta
            self.newest, self.newest_version, self.contents = stored, manifest.version, manifest.contents

    def snapshot_is_due(self) -> bool:
        """Return whether the interval is over, or the deltas since the last snapshot have more bytes than a new
        snapshot."""
        return len(self._since_snapshot) >= self._anchor_interval or sum(self._since_snapshot) > self._snapshots[-1][2]

    def stored(self, size_bytes: int, seconds: float) -> Stored:
        """Return the newest version with its snapshot."""
        assert self.newest is not None
        assert self.newest_version is not None
        version, snapshot, snapshot_bytes = self._snapshots[-1]
        return Stored(self.newest_version, self.newest, version, snapshot, snapshot_bytes, size_bytes, seconds)

    def prune(self) -> list[str]:
        """Remove the versions that neither a member nor the newest chains need, and return their names."""
        first = self._snapshots[-SNAPSHOTS_KEPT:][0][0]
        held = self._oldest_held()
        if held is not None:
            # A member continues with the delta after its version; that delta's base is named, but not read.
            first = min(first, held)
        names = [name for version in self._objects if version < first for name in self._objects[version]]
        self._objects = {version: names for version, names in self._objects.items() if version >= first}
        self._snapshots = [kept for kept in self._snapshots if kept[0] >= first]
        return names

    def _add(self, manifest: StoredVersion, stored: StoredObject) -> None:
        names = [part.name for part in manifest.parts] + [stored.name]
        self._objects.setdefault(manifest.version, []).extend(names)


log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.2
MAX_SNAPSHOTS = 3
"""Number of snapshots in a row that one member may cause; then it waits for the regular snapshots."""


@dataclass
class _Member:
    held: Version | None = None
    offered: Stored | None = None
    offered_s: float = 0.0
    next_s: float = 0.0
    """Monotonic time of the next offer; a newer version is offered earlier."""
    failures: int = 0
    damaged: int = 0
    """Number of snapshots in a row that did not help the member."""
    attempt: int = 0


class StoreOffers:
    """Offers of one run. `send` and `on_result` are called from this object's thread."""

    def __init__(
        self,
        *,
        run_id: str,
        url: str,
        algorithm: Algorithm,
        max_wait_s: float,
        send: Callable[[StoreOffer], None],
        on_result: Callable[[PublishResult], None],
    ) -> None:
        self._run_id = run_id
        self._url = url
        self._algorithm: Algorithm = algorithm
        self._max_wait_s = max_wait_s
        self._send = send
        self._on_result = on_result
        self._members: dict[str, _Member] = {}
        self._epoch = 0
        self._newest: Stored | None = None
        self._results: list[PublishResult] = []
        self._wants_snapshot = False
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="weight-offers", daemon=True).start()

    @property
    def wants_snapshot(self) -> bool:
        """Return whether a member needs a snapshot, because it cannot read the newest version from the stored files."""
        return self._wants_snapshot

    def announce(self, stored: Stored) -> None:
        """Offer a version that is complete in the store, or has a new snapshot."""
        with self._changed:
            if self._newest is None or stored.snapshot_version > self._newest.snapshot_version:
                # Members that could not read the version may try again at once.
                for member in self._members.values():
                    if member.failures:
                        member.next_s = 0.0
            self._newest = stored
            self._changed.notify_all()

    def set_members(self, epoch: int, member_ids: Iterable[str]) -> None:
        """Replace the members that get offers."""
        with self._changed:
            self._epoch = epoch
            self._members = {member_id: self._members.get(member_id) or _Member() for member_id in member_ids}
            self._changed.notify_all()

    def answer(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """Record a member's answer. Unknown members are ignored, because they have left."""
        with self._changed:
            member = self._members.get(member_id)
            if member is None:
                return
            published = self._newest is not None and version <= self._newest.version
            if ok and published and (member.held is None or version > member.held):
                member.held, member.failures, member.damaged = version, 0, 0
            offered = member.offered
            if offered is None or offered.version != version:
                return
            now = time.monotonic()
            member.next_s = now  # the next version may follow at once
            if not ok:
                member.failures += 1
                member.next_s = now + pause_after(member.failures, FIRST_BACKOFF_S, self._max_wait_s)
                newest = self._newest
                # One snapshot for each round of failed offers, and none while a newer one has not been tried.
                if damaged and newest is not None and newest.snapshot == offered.snapshot:
                    member.damaged += 1
                    self._wants_snapshot = self._wants_snapshot or member.damaged <= MAX_SNAPSHOTS
            self._results.append(
                PublishResult(
                    member_id,
                    self._epoch,
                    member.attempt,
                    version,
                    ok=ok,
                    ack_s=now - member.offered_s,
                    size_bytes=offered.size_bytes,
                    failure="" if ok else "refused",
                    error="" if ok else self._explained(message, damaged),
                )
            )
            member.offered = None
            self._changed.notify_all()

    def progress(self, member_id: str) -> None:
        """Note that a member still works on an offered version."""
        with self._changed:
            member = self._members.get(member_id)
            if member is not None and member.offered is not None:
                member.next_s = time.monotonic() + self._max_wait_s

    def interrupt(self) -> None:
        with self._changed:
            for member in self._members.values():
                member.next_s, member.offered = 0.0, None
            self._changed.notify_all()

    def oldest_held(self) -> Version | None:
        """Return the slowest member's version; None if no member holds one."""
        with self._changed:
            return min((m.held for m in self._members.values() if m.held is not None), default=None)

    def snapshot_ordered(self) -> None:
        """Note that the wanted snapshot is being written."""
        self._wants_snapshot = False

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _explained(self, message: str, damaged: bool) -> str:
        if damaged:
            return message
        return (
            f"{message} (weights are at {self._url}: a worker without access to it cannot read them; "
            "set weights.store to a URL that all workers can reach)"
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                offers = self._due()
                results, self._results = self._results, []
                if not offers and not results:
                    if self._closed:
                        return
                    # No deadline unless members are behind: a version may take as long as a step does.
                    self._changed.wait(self._seconds_to_next())
                    continue
            for result in results:
                self._guarded(self._on_result, result)
            for offer in offers:
                self._guarded(self._send, offer)

    def _guarded(self, call: Callable[..., None], argument: PublishResult | StoreOffer) -> None:
        try:
            call(argument)
        except Exception as error:  # raised by the listener; other members must not lose their offers by it
            unforeseen.note("handling an offer of stored weights", error)  # the offer is repeated

    def _due(self) -> list[StoreOffer]:
        newest, now = self._newest, time.monotonic()
        if newest is None or self._closed:
            return []
        offers = []
        for member_id, member in self._members.items():
            overtaken = member.offered is not None and member.offered.version < newest.version
            if self._is_behind(member) and (overtaken or member.next_s <= now):
                member.offered, member.offered_s = newest, now
                member.next_s = now + self._max_wait_s
                member.attempt += 1
                offers.append(self._offer(member_id, newest))
        return offers

    def _is_behind(self, member: _Member) -> bool:
        return self._newest is not None and (member.held is None or member.held < self._newest.version)

    def _seconds_to_next(self) -> float | None:
        next_s = min((m.next_s for m in self._members.values() if self._is_behind(m)), default=math.inf)
        return None if next_s == math.inf else max(0.001, next_s - time.monotonic())

    def _offer(self, member_id: str, stored: Stored) -> StoreOffer:
        return StoreOffer(
            run_id=self._run_id,
            epoch=self._epoch,
            member_id=member_id,
            version=stored.version,
            url=self._url,
            algorithm=self._algorithm,
            manifest=stored.manifest,
            snapshot_version=stored.snapshot_version,
            snapshot=stored.snapshot,
            snapshot_bytes=stored.snapshot_bytes,
        )
