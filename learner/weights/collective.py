"""The collective channel: all ranks gather, rank 0 stages the copy, and links bring it to the members."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from learner.weights.catch_up import CatchUp
from learner.weights.gather import gather_weights
from learner.weights.publisher import Publisher
from paceline.groups import Version


class CollectiveChannel:
    """See `WeightChannel`. The publisher and the way to catch up are there on rank 0 only; `announce(version, gather_s)`
    is called on every rank, before a member can have the version."""

    def __init__(
        self,
        publisher: Publisher | None,
        catch_up: CatchUp | None,
        dtype: torch.dtype,
        announce: Callable[[Version, float], None],
    ) -> None:
        self._publisher = publisher
        self._catch_up = catch_up
        self._dtype = dtype
        self._announce = announce

    @property
    def wants_anchor(self) -> bool:
        """See `WeightChannel.wants_anchor`: whoever cannot catch up from the store has a link."""
        return False

    def publish(self, version: Version, model: nn.Module) -> None:
        """See `WeightChannel.publish`."""
        started_s = time.perf_counter()
        tensors = gather_weights(model, self._dtype)
        self._announce(version, time.perf_counter() - started_s)
        if self._publisher is not None:
            self._publisher.stage(version, tensors)
        if self._catch_up is not None:
            self._catch_up.stage(version, tensors)

    def write_anchor(self) -> None:
        """See `WeightChannel.write_anchor`."""

    def set_members(self, epoch: int, member_ids: Sequence[str]) -> None:
        """See `WeightChannel.set_members`."""
        if self._catch_up is not None:
            self._catch_up.set_members(epoch, member_ids)

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """See `WeightChannel.acknowledge`."""
        if self._catch_up is not None:
            self._catch_up.answer(member_id, version, ok, message, damaged)
        if self._publisher is not None:
            self._publisher.acknowledge(member_id, version, ok, message)

    def progress(self, member_id: str, version: Version) -> None:
        """See `WeightChannel.progress`."""
        if self._catch_up is not None:
            self._catch_up.progress(member_id)
        if self._publisher is not None:
            self._publisher.progress(member_id, version)

    def interrupt(self, reason: str) -> None:
        """See `WeightChannel.interrupt`."""
        if self._catch_up is not None:
            self._catch_up.interrupt()
        if self._publisher is not None:
            self._publisher.interrupt(reason)

    def close(self) -> None:
        """See `WeightChannel.close`."""
        if self._catch_up is not None:
            self._catch_up.close()
        if self._publisher is not None:
            self._publisher.close()
