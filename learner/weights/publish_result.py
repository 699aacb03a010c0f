"""How an attempt to bring one version to one member ended: what links and store offers report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.groups import Version

Failure = Literal["", "link", "silent", "refused", "interrupted"]
"""Why a version did not reach a member: the link was not formed, broke or was too slow; no answer came; the answer was
no; or the control plane was away."""


@dataclass(frozen=True)
class PublishResult:
    """How one attempt to bring one version to one member ended."""

    member_id: str
    epoch: int
    attempt: int
    version: Version
    ok: bool
    """The member acknowledged the version; the only proof there is."""
    form_s: float = 0.0
    """Forming the link; 0 when it was there."""
    transfer_s: float = 0.0
    """Sending the buckets."""
    ack_s: float = 0.0
    """From the last bucket to the member's answer: checksums and the engine's swap."""
    size_bytes: int = 0
    failure: Failure = ""
    error: str = ""
    fallback: str = ""
    """What the next attempt's link is made of, if this one made it change."""
