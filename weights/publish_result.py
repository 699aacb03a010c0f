"""Result of an attempt to bring one version to one member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.groups import Version

Failure = Literal["", "link", "silent", "refused"]
"""Reason why a version did not reach a member: the bytes did not arrive in time; no answer came; or the answer was no."""


@dataclass(frozen=True)
class PublishResult:
    """Result of one attempt to bring one version to one member."""

    member_id: str
    epoch: int
    attempt: int
    version: Version
    ok: bool
    """True when the member acknowledged the version, which is the only proof."""
    transfer_s: float = 0.0
    """Seconds in which its host got the bytes."""
    ack_s: float = 0.0
    """Seconds from the last byte to the member's answer: checksums and the engine's swap."""
    size_bytes: int = 0
    failure: Failure = ""
    error: str = ""
