"""The learner's side of a weight channel: what the loop of a run needs, whichever way the weights go.

Every rank has one; rank 0's has a class of its own, which also faces the members. `publish`, `write_snapshot` and making it are collective calls; the rest matters on rank 0 only, where
the control plane's thread calls it. `publish` returns as soon as the copy is made that later steps do not touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from paceline.groups import Version


class WeightChannel(Protocol):
    """Brings every published version, or the newest, to the members of the epoch."""

    @property
    def wants_snapshot(self) -> bool:
        """Return whether a member needs one: then `write_snapshot` is to be called on all ranks. Raises what ended a thread."""

    def publish(self, version: Version, model: nn.Module) -> None:
        """Make the model's weights, as they are now, `version`."""

    def write_snapshot(self) -> None:
        """Write the newest version in full, where the channel has a store."""

    def set_members(self, epoch: int, member_ids: Sequence[str]) -> None:
        """Who receives from now on. Returns at once."""

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """A member's answer to an offer."""

    def progress(self, member_id: str, version: Version) -> None:
        """A member's word that it still works on what it was offered."""

    def interrupt(self, reason: str) -> None:
        """The control plane was away: what was offered, or answered, may have been lost."""

    def close(self) -> None:
        """End all threads, without waiting for a stuck one."""


class WithoutMembers:
    """The part of a channel that faces the members, on the ranks beside rank 0: members talk to rank 0 alone."""

    def set_members(self, epoch: int, member_ids: Sequence[str]) -> None:
        """See `WeightChannel.set_members`."""

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """See `WeightChannel.acknowledge`."""

    def progress(self, member_id: str, version: Version) -> None:
        """See `WeightChannel.progress`."""

    def interrupt(self, reason: str) -> None:
        """See `WeightChannel.interrupt`."""
