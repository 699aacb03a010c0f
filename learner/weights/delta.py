"""The delta channel: every rank writes its slices to the store, members read at their own pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from learner.weights.shards import local_slices, plan_tensors
from learner.weights.store_offers import StoreOffers
from learner.weights.store_writer import StoreWriter
from paceline.groups import Version
from paceline.weights.manifest import TensorPlan


class DeltaChannel:
    """See `WeightChannel`. `offers` is there on rank 0 only; `announce(version, gather_s)` is called on every rank,
    before a member can have the version."""

    def __init__(
        self,
        writer: StoreWriter,
        offers: StoreOffers | None,
        dtype: torch.dtype,
        announce: Callable[[Version, float], None],
    ) -> None:
        self._writer = writer
        self._offers = offers
        self._dtype = dtype
        self._announce = announce
        self._tensors: tuple[TensorPlan, ...] = ()

    @property
    def wants_anchor(self) -> bool:
        """See `WeightChannel.wants_anchor`."""
        self._writer.check()
        return self._offers is not None and self._offers.wants_anchor

    def publish(self, version: Version, model: nn.Module) -> None:
        """See `WeightChannel.publish`: the time is that of copying this rank's slices."""
        started_s = time.perf_counter()
        slices = local_slices(model, self._dtype)
        self._announce(version, time.perf_counter() - started_s)
        self._tensors = self._tensors or plan_tensors(model, self._dtype)
        self._writer.put(version, slices, self._tensors)

    def write_anchor(self) -> None:
        """See `WeightChannel.write_anchor`."""
        if self._offers is not None:
            self._offers.anchor_ordered()
        self._writer.put_anchor()

    def set_members(self, epoch: int, member_ids: Sequence[str]) -> None:
        """See `WeightChannel.set_members`."""
        if self._offers is not None:
            self._offers.set_members(epoch, member_ids)

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """See `WeightChannel.acknowledge`."""
        if self._offers is not None:
            self._offers.answer(member_id, version, ok, message, damaged)

    def progress(self, member_id: str, version: Version) -> None:
        """See `WeightChannel.progress`."""
        if self._offers is not None:
            self._offers.progress(member_id)

    def interrupt(self, reason: str) -> None:
        """See `WeightChannel.interrupt`."""
        if self._offers is not None:
            self._offers.interrupt()

    def close(self) -> None:
        """See `WeightChannel.close`."""
        if self._offers is not None:
            self._offers.close()
        self._writer.close()
