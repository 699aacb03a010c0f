"""Result of an attempt to bring one version to one member, which links and store offers report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.groups import Version

Failure = Literal["", "link", "silent", "refused", "interrupted"]
"""Reason why a version did not reach a member: the link was not formed, broke or was too slow; no answer came; the
answer was no; or the control plane was away."""


@dataclass(frozen=True)
class PublishResult:
    """Result of one attempt to bring one version to one member."""

    member_id: str
    epoch: int
    attempt: int
    version: Version
    ok: bool
    """True when the member acknowledged the version, which is the only proof."""
    form_s: float = 0.0
    """Seconds of forming the link; 0 when it existed."""
    transfer_s: float = 0.0
    """Seconds of sending the buckets."""
    ack_s: float = 0.0
    """Seconds from the last bucket to the member's answer: checksums and the engine's swap."""
    size_bytes: int = 0
    failure: Failure = ""
    error: str = ""
    fallback: str = ""
    """Backend of the next attempt's link, if this attempt changed it."""
