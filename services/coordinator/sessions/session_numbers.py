"""Unused session numbers: unknown to the ledger, to every folder of a checkpoint and to every live worker.

A version of the weights and a checkpoint are named by session and step. After a backup was put back the ledger knows
less than the disk and the workers do, and a number given twice would be one name for two sets of weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from paceline.files.names import CHECKPOINT_MANIFEST
from paceline.services.coordinator.ledger.restored_backup import free_name

NAME = re.compile(r"(\d{1,18})-(\d{1,18})")
MOST_LOST = 10_000
"""Most sessions that a ledger may be behind; a name with a later session is ignored."""

log = logging.getLogger(__name__)


class OnDisk(NamedTuple):
    """Content of the folder of a run's checkpoints."""

    session: int = 0
    """Largest session that a folder in it names."""
    moved: tuple[str, ...] = ()
    """Checkpoints ahead of the ledger that were set aside."""
    place: str = ""
    """Folder where they are now."""


class SessionNumbers:
    """Sessions that were found outside of the ledger, by run."""

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}

    def note_session(self, run_id: str, newest: int, session: int) -> bool:
        """Note that something names this session of the run, whose newest on record is `newest`; return False for an
        impossible number."""
        if not 0 <= session <= newest + MOST_LOST:
            log.warning("session %d of run %s cannot be, the newest is %d", session, run_id, newest)
            return False
        self._heard[run_id] = max(self._heard.get(run_id, 0), session)
        return True

    def next(self, run_id: str, newest: int) -> int:
        """Return the number of the next session."""
        return max(newest, self._heard.get(run_id, 0)) + 1


def session_of(name: str) -> int | None:
    """Return the session in the name of a checkpoint's folder; None for another name."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def scan_checkpoints(
    checkpoints: Path, position: tuple[int, int], known_paths: Collection[str], *, move: bool
) -> OnDisk:
    """Return the content of the folder of a run's checkpoints; `position` are the ledger's newest session and next
    step.

    With `move`, complete checkpoints that are ahead of the ledger are set aside in the same folder, where retention
    does not delete them; checkpoints of `known` paths stay.
    """
    if not checkpoints.is_dir():
        return OnDisk()
    found = [
        (int(match[1]), int(match[2]), each)
        for each in checkpoints.iterdir()
        if (match := NAME.fullmatch(each.name)) and each.is_dir()
    ]
    largest = max((session for session, _, _ in found), default=0)
    ahead = [
        each
        for session, step, each in sorted(found)
        if (session > position[0] or (session == position[0] and step > position[1]))
        and str(each) not in known_paths
        and (each / CHECKPOINT_MANIFEST).exists()
    ]
    if not ahead or not move:
        return OnDisk(largest)
    place = free_name(checkpoints / "set-aside")
    place.mkdir()
    for each in ahead:
        each.rename(place / each.name)
    return OnDisk(largest, tuple(each.name for each in ahead), str(place))
