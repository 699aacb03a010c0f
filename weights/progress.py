"""Describes a member's progress with a version, its time limits, and the result of an attempt to bring it a version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.groups import Version

Phase = Literal["receiving", "loading"]
Failure = Literal["", "link", "silent", "refused"]
"""Reason why a version did not reach a member: the bytes came too late; no answer came; or the member refused it."""

FLOOR_BYTES_PER_S = 20e6
"""Slowest rate in bytes per second at which a member may check and load; slower members count as faulty."""


class WeightProgress(NamedTuple):
    version: Version
    phase: Phase
    received_bytes: int


def slowest_s(size_bytes: int) -> float:
    return size_bytes / FLOOR_BYTES_PER_S


def longest_s(max_wait_s: float, size_bytes: int) -> float:
    """Return the longest time in seconds that a member may work on `size_bytes` after they arrived, even if it keeps
    reporting: twenty times the allowed silence plus the time that the bytes need at the slowest rate."""
    return 20 * max_wait_s + slowest_s(size_bytes)


@dataclass(frozen=True)
class PublishResult:
    """Result of one attempt to bring one version to one member."""

    member_id: str
    epoch: int
    attempt: int
    version: Version
    ok: bool
    """True if the member acknowledged the version, which is the only proof."""
    transfer_s: float = 0.0
    """Seconds from the announcement of the version until the member's host had the bytes."""
    ack_s: float = 0.0
    """Seconds from the last byte to the member's answer: checksums and the engine's swap."""
    size_bytes: int = 0
    failure: Failure = ""
    error: str = ""
