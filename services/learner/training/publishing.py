"""Publishing of one run's weights: the channel, and the members named before the channel exists."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from torch import nn

from paceline.errors import Conflict
from paceline.groups import Version
from paceline.learner.weights.channel import WeightChannel
from paceline.services.learner.context import RankContext
from paceline.services.learner.training.weight_channel import make_channel
from paceline.spec import RunSpec
from paceline.v1 import worker_pb2


class Publishing:
    """One rank's side. Without `open` nothing is published. `open`, `publish` and `write_snapshot` are collective calls; the
    other methods are called by the control plane's thread, and ignore messages of another run."""

    def __init__(
        self,
        assignment: worker_pb2.RunAssignment,
        spec: RunSpec,
        rank: RankContext,
        warn: Callable[[str], None],
    ) -> None:
        self._assignment, self._spec, self._rank, self._warn = assignment, spec, rank, warn
        self._channel: WeightChannel | None = None
        self._roster: worker_pb2.Epoch | None = None
        """Newest roster of this run, named since the run began."""
        self._opening = threading.Lock()
        """Guards the two above: a roster that comes while the channel opens must reach it."""

    def open(self, model: nn.Module) -> None:
        """Make the channel for the versions of `model`. Raises InvalidInput for an object store that cannot be used."""
        self._model = model
        channel = make_channel(self._assignment, self._spec, self._rank, self._warn, model)
        with self._opening:
            roster = self._roster or self._rank.early_roster
            if roster is not None and roster.run_id == self._assignment.run_id:
                channel.set_members(roster.number, roster.member_ids, roster.host_member_ids)
            self._channel = channel

    @property
    def wants_snapshot(self) -> bool:
        """Return whether `write_snapshot` is to be called on all ranks. Raises the error that ended a thread."""
        return self._channel is not None and self._channel.wants_snapshot

    def write_snapshot(self) -> None:
        """Write the newest version in full to the object store."""
        if self._channel is not None:
            self._channel.write_snapshot()

    def publish(self, step: int, *, last: bool) -> None:
        """Copy the model as version `step`; the copy travels while the next step trains. Steps that an earlier session has
        published are not published again, except the last."""
        if self._channel is None or (step < self._assignment.publish_from_step and not last):
            return
        self._channel.publish(Version(self._assignment.session, step), self._model)

    def set_members(self, roster: worker_pb2.Epoch) -> None:
        """Set the members that receive weights from now on."""
        if roster.run_id != self._assignment.run_id:
            return
        with self._opening:
            self._roster = roster
            if self._channel is not None:
                with contextlib.suppress(Conflict):  # the run ends at this very moment
                    self._channel.set_members(roster.number, roster.member_ids, roster.host_member_ids)

    def acknowledge(self, ack: worker_pb2.WeightAck) -> None:
        """Take a member's answer to an offer."""
        if self._channel is not None and ack.run_id == self._assignment.run_id:
            version = Version(ack.version.session, ack.version.step)
            self._channel.acknowledge(ack.member_id, version, ack.ok, ack.message, ack.damaged)

    def progress(self, progress: worker_pb2.WeightProgress) -> None:
        """Note that a member still works on an offered version."""
        if self._channel is not None and progress.run_id == self._assignment.run_id:
            version = Version(progress.version.session, progress.version.step)
            loading = progress.phase in (worker_pb2.WEIGHT_PHASE_RECEIVED, worker_pb2.WEIGHT_PHASE_LOADING)
            self._channel.progress(progress.member_id, version, progress.received_bytes, loading)

    def interrupt(self, reason: str) -> None:
        """Try again offers that may have been lost while the coordinator was away."""
        if self._channel is not None:
            self._channel.interrupt(reason)

    def close(self) -> None:
        """End the channel's threads."""
        if self._channel is not None:
            self._channel.close()
