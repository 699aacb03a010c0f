"""The learner's side of a weight channel, with one interface for every kind of channel.

Every rank has a channel; rank 0 has a separate class, which also serves the members. `publish`, `write_snapshot` and
the construction are collective calls. The other methods matter only on rank 0, where the control plane's thread calls
them; on other ranks they do nothing. `publish` returns once it has copied the weights; later steps do not touch the
copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from paceline.groups import Version


class WeightChannel:
    """Sends every published version, or the newest, to the members of the roster."""

    @property
    def wants_snapshot(self) -> bool:
        """Return whether all ranks must call `write_snapshot` for a member. Raises a failed thread's error."""
        return False

    def publish(self, version: Version, model: nn.Module) -> None:
        """Publish the model's current weights as `version`."""
        raise NotImplementedError

    def write_snapshot(self) -> None:
        """Write the newest version in full, if the channel uses the object store."""

    def set_members(self, epoch: int, member_ids: Sequence[str], by_host: Collection[str] = ()) -> None:
        """Set the members that receive versions, and return at once. The hosts of the members in `by_host` have
        relays."""

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """Process a member's answer to an offer."""

    def progress(self, member_id: str, version: Version, received_bytes: int = 0, loading: bool = False) -> None:
        """Note that a member still works on a version: it has `received_bytes`, or its engine is `loading` them."""

    def interrupt(self, reason: str) -> None:
        """Repeat the offers that may be unanswered, because messages were lost while the control plane was away."""

    def close(self) -> None:
        """End all threads, without waiting for a stuck thread."""
