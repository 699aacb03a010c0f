"""The delta channel: every rank writes its slices to the store, members read at their pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from paceline.groups import Version
from paceline.learner.weights.channel import WithoutMembers
from paceline.learner.weights.device_snapshot import DeviceSnapshot
from paceline.learner.weights.shards import NO_TILES, ColumnTiles, local_slices, plan_tensors
from paceline.weights.format.manifest import TensorPlan
from paceline.weights.store.offers import StoreOffers
from paceline.weights.store.version_source import VersionSource, WholeSlices
from paceline.weights.store.writer import StoreWriter


class DeltaChannel(WithoutMembers):
    """A `WeightChannel` on the ranks beside rank 0, which only write their slices."""

    def __init__(
        self,
        writer: StoreWriter,
        dtype: torch.dtype,
        tiles: ColumnTiles = NO_TILES,
        *,
        on_device: bool = True,
    ) -> None:
        """`on_device`: keep a copy on the GPU where one fits now, to compare the next version with."""
        self._writer = writer
        self._on_device = on_device
        self._dtype = dtype
        self._tiles = tiles
        self._tensors: tuple[TensorPlan, ...] = ()
        self._snapshot: DeviceSnapshot | None = None

    @property
    def wants_snapshot(self) -> bool:
        """See `WeightChannel.wants_snapshot`."""
        self._writer.check()
        return False

    def publish(self, version: Version, model: nn.Module) -> None:
        """See `WeightChannel.publish`: the time is that of copying this rank's slices, or of comparing them on its GPU."""
        if not self._tensors:
            self._tensors = plan_tensors(model, self._dtype)
            snapshot_here = DeviceSnapshot(model, self._dtype, self._tiles)
            self._snapshot = snapshot_here if self._on_device and snapshot_here.fits() else None
        snapshot = self._snapshot

        def take(replaced: VersionSource | None) -> VersionSource:
            started_s = time.perf_counter()
            if snapshot is not None:
                source = snapshot.take(replaced)
            else:
                source = WholeSlices(local_slices(model, self._dtype, self._tiles))
            self._copied(version, time.perf_counter() - started_s)
            return source

        self._writer.take(version, take, self._tensors)

    def write_snapshot(self) -> None:
        """See `WeightChannel.write_snapshot`."""
        self._writer.put_snapshot()

    def close(self) -> None:
        """See `WeightChannel.close`."""
        self._writer.close()

    def _copied(self, version: Version, copy_s: float) -> None:
        """Note that this rank's slices of the version are copied, and not yet written."""


class Rank0DeltaChannel(DeltaChannel):
    """The channel on rank 0, which also makes the offers. `announce(version, copy_s)` is called before a member can have the version."""

    def __init__(
        self,
        writer: StoreWriter,
        offers: StoreOffers,
        dtype: torch.dtype,
        announce: Callable[[Version, float], None],
        tiles: ColumnTiles = NO_TILES,
        *,
        on_device: bool = True,
    ) -> None:
        super().__init__(writer, dtype, tiles, on_device=on_device)
        self._offers = offers
        self._announce = announce

    @property
    def wants_snapshot(self) -> bool:
        """See `WeightChannel.wants_snapshot`."""
        self._writer.check()
        return self._offers.wants_snapshot

    def write_snapshot(self) -> None:
        """See `WeightChannel.write_snapshot`."""
        self._offers.snapshot_ordered()
        self._writer.put_snapshot()

    def set_members(self, epoch: int, member_ids: Sequence[str], by_host: Collection[str] = ()) -> None:
        """See `WeightChannel.set_members`."""
        self._offers.set_members(epoch, member_ids)

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """See `WeightChannel.acknowledge`."""
        self._offers.answer(member_id, version, ok, message, damaged)

    def progress(
        self, member_id: str, version: Version, received_bytes: int = 0, loading: bool = False
    ) -> None:
        """See `WeightChannel.progress`."""
        self._offers.progress(member_id)

    def interrupt(self, reason: str) -> None:
        """See `WeightChannel.interrupt`."""
        self._offers.interrupt()

    def close(self) -> None:
        """See `WeightChannel.close`."""
        self._offers.close()
        super().close()

    def _copied(self, version: Version, copy_s: float) -> None:
        self._announce(version, copy_s)
