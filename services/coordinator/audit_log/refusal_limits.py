"""How many refusals are recorded one by one, so that nobody fills the disk, or pushes older records out, by calls that are refused.

A source (the member that reports a refusal, else a caller's name, else the peer's host) has FIRST records of its own in a window; all
sources together have MOST. Further refusals are counted, and one record a window and source stands for them; sources beyond MAX_SOURCES
share one. A pure state machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.refusal_sums import host_of
from services.coordinator.audit_log.record import Entry

WINDOW_S = 60.0
FIRST = 10
FIRST_REPORTED = 20
"""Records of a member that reports refusals: it speaks for several ports."""
MOST = 60
MAX_SOURCES = 32
OTHERS = "others"
"""Source of refusals beyond MAX_SOURCES."""


@dataclass
class _Counted:
    recorded: int = 0
    left_out: int = 0
    newest: Entry | None = None


class RefusalLimits:
    """Refusals of one log: those of the coordinator, or those that members report, which then cannot displace the former."""

    def __init__(self, first: int = FIRST) -> None:
        self._first = first
        self._sources: dict[str, _Counted] = {}
        self._recorded = 0
        self._end_s = 0.0

    def admits(self, entry: Entry, now_s: float) -> bool:
        """Return whether a refusal is recorded by itself; count it otherwise. Call `due` before."""
        name = entry.reported_by or entry.who or host_of(entry.address)
        if name not in self._sources and len(self._sources) >= MAX_SOURCES:
            name = OTHERS
        counted = self._sources.setdefault(name, _Counted())
        if not self._end_s:
            self._end_s = now_s + WINDOW_S
        if counted.recorded < self._first and self._recorded < MOST:
            counted.recorded += 1
            self._recorded += 1
            return True
        counted.left_out += entry.count
        counted.newest = entry
        return False

    def due(self, now_s: float, *, last: bool = False) -> list[Entry]:
        """Return the records that stand for what was left out, once the window has ended; then the next one begins. `last`
        ends it now."""
        if not self._end_s or (now_s < self._end_s and not last):
            return []
        found = [
            replace(
                counted.newest,
                count=counted.left_out,
                why=f"{counted.left_out} more refusals {_origin(name, counted.newest)}; this is the newest: {counted.newest.why}",
            )
            for name, counted in self._sources.items()
            if counted.newest is not None
        ]
        self._sources, self._recorded, self._end_s = {}, 0, 0.0
        return found


def _origin(source: str, newest: Entry) -> str:
    return f"reported by {source}" if newest.reported_by else f"of {source or 'an unknown peer'}"
