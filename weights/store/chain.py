"""Record of a session's versions in the object store, on rank 0: deltas, snapshots, and the versions that may be pruned.

Promise: `prune` names no version that a member which holds `oldest_held` still has to read, nor one of the newest chains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.groups import Version
from paceline.weights.store.store_format import StoredObject, StoredVersion

SNAPSHOTS_KEPT = 2
"""Chains that are never pruned: the newest, and the one before, which a joining member may be reading."""


@dataclass(frozen=True)
class Stored:
    """A version that is complete in the store, and the newest snapshot before or at it."""

    version: Version
    manifest: StoredObject
    snapshot_version: Version
    snapshot: StoredObject
    """The snapshot's manifest."""
    snapshot_bytes: int
    """Size of the snapshot's parts."""
    size_bytes: int
    """Bytes that a member with the version before has to read."""
    seconds: float
    """Seconds from `put` to the manifest."""


class Chain:
    """Chain of one session. `oldest_held` returns the slowest member's version (None: no member needs an old version)."""

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
        """Return whether the interval is over, or a start from the last snapshot reads more in deltas than a new one has."""
        return (
            len(self._since_snapshot) >= self._anchor_interval
            or sum(self._since_snapshot) > self._snapshots[-1][2]
        )

    def stored(self, size_bytes: int, seconds: float) -> Stored:
        """Return the newest version with its snapshot."""
        assert self.newest is not None
        assert self.newest_version is not None
        version, snapshot, snapshot_bytes = self._snapshots[-1]
        return Stored(
            self.newest_version, self.newest, version, snapshot, snapshot_bytes, size_bytes, seconds
        )

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
