"""The collective channel: all ranks gather, rank 0 stages the copy, and links bring it to the members."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from learner.weights.catch_up import CatchUp
from learner.weights.channel import WithoutMembers
from learner.weights.gather import gather_weights
from learner.weights.publisher import Publisher
from paceline.groups import Version


class CollectiveChannel(WithoutMembers):
    """A `WeightChannel` on the ranks beside rank 0, which only take part in gathering."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @property
    def wants_snapshot(self) -> bool:
        """See `WeightChannel.wants_snapshot`: members that cannot catch up from the store have links."""
        return False

    def publish(self, version: Version, model: nn.Module) -> None:
        """See `WeightChannel.publish`."""
        gather_weights(model, self._dtype)

    def write_snapshot(self) -> None:
        """See `WeightChannel.write_snapshot`."""

    def close(self) -> None:
        """See `WeightChannel.close`."""


class Rank0CollectiveChannel(CollectiveChannel):
    """The channel on rank 0, which stages the gathered version. `announce(version, gather_s)` is called before a member can have the version."""

    def __init__(
        self,
        publisher: Publisher,
        catch_up: CatchUp,
        dtype: torch.dtype,
        announce: Callable[[Version, float], None],
    ) -> None:
        super().__init__(dtype)
        self._publisher = publisher
        self._catch_up = catch_up
        self._announce = announce

    def publish(self, version: Version, model: nn.Module) -> None:
        """See `WeightChannel.publish`."""
        started_s = time.perf_counter()
        tensors = gather_weights(model, self._dtype)
        self._announce(version, time.perf_counter() - started_s)
        self._publisher.stage(version, tensors)
        self._catch_up.stage(version, tensors)

    def set_members(self, epoch: int, member_ids: Sequence[str], by_host: Collection[str] = ()) -> None:
        """See `WeightChannel.set_members`."""
        self._catch_up.set_members(epoch, member_ids)

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """See `WeightChannel.acknowledge`."""
        self._catch_up.answer(member_id, version, ok, message, damaged)
        self._publisher.acknowledge(member_id, version, ok, message)

    def progress(
        self, member_id: str, version: Version, received_bytes: int = 0, loading: bool = False
    ) -> None:
        """See `WeightChannel.progress`."""
        self._catch_up.progress(member_id)
        self._publisher.progress(member_id, version)

    def interrupt(self, reason: str) -> None:
        """See `WeightChannel.interrupt`."""
        self._catch_up.interrupt()
        self._publisher.interrupt(reason)

    def close(self) -> None:
        """See `WeightChannel.close`."""
        self._catch_up.close()
        self._publisher.close()
