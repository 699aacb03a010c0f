"""What a session has put into the weight store, as rank 0 knows it: deltas by version, snapshots, and what may go.

Promise: `prune` names nothing that a member which holds `oldest_held` still has to read, nor the newest snapshots' chains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.groups import Version
from paceline.weights.store_format import StoredObject, StoredVersion

SNAPSHOTS_KEPT = 2
"""Chains that are never pruned: the newest, and the one before, which a joiner may just be reading."""


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
    """Of the parts that a member with the version before has to read."""
    seconds: float
    """From `put` to the manifest."""


class Chain:
    """Of one session. `oldest_held` says what the slowest member holds (None: nobody needs an old version)."""

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
        """The delta whose manifest is in the store as `stored`."""
        self._add(manifest, stored)
        self._since_snapshot.append(manifest.size_bytes)
        self.newest, self.newest_version, self.contents = stored, manifest.version, manifest.contents

    def add_snapshot(self, manifest: StoredVersion, stored: StoredObject) -> None:
        """The snapshot whose manifest is in the store as `stored`."""
        self._add(manifest, stored)
        self._since_snapshot = []
        self._snapshots = [known for known in self._snapshots if known[0] != manifest.version]
        self._snapshots.append((manifest.version, stored, manifest.size_bytes))
        if self.newest is None:  # the first of a session has no delta
            self.newest, self.newest_version, self.contents = stored, manifest.version, manifest.contents

    def snapshot_is_due(self) -> bool:
        """Return the interval is over, or whoever starts from the last snapshot reads more in deltas than a new one has."""
        return (
            len(self._since_snapshot) >= self._anchor_interval
            or sum(self._since_snapshot) > self._snapshots[-1][2]
        )

    def stored(self, size_bytes: int, seconds: float) -> Stored:
        """Return the newest version, for those who will read it."""
        assert self.newest is not None
        assert self.newest_version is not None
        version, snapshot, snapshot_bytes = self._snapshots[-1]
        return Stored(
            self.newest_version, self.newest, version, snapshot, snapshot_bytes, size_bytes, seconds
        )

    def prune(self) -> list[str]:
        """Forget what neither a member nor the newest chains need, and returns its names."""
        first = self._snapshots[-SNAPSHOTS_KEPT:][0][0]
        held = self._oldest_held()
        if held is not None:
            # A member goes on from what it holds with the delta after it; that one's base is named, but not read.
            first = min(first, held)
        names = [name for version in self._objects if version < first for name in self._objects[version]]
        self._objects = {version: names for version, names in self._objects.items() if version >= first}
        self._snapshots = [known for known in self._snapshots if known[0] >= first]
        return names

    def _add(self, manifest: StoredVersion, stored: StoredObject) -> None:
        names = [part.name for part in manifest.parts] + [stored.name]
        self._objects.setdefault(manifest.version, []).extend(names)
