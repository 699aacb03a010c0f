"""The delta channel: every rank writes its slices to the object store, and each member reads at its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from paceline.groups import Version
from paceline.learner.weights.channel import WeightChannel
from paceline.learner.weights.device_snapshot import DeviceSnapshot, local_slices
from paceline.learner.weights.gather import plan_tensors
from paceline.weights.format.manifest import TensorPlan
from paceline.weights.store.offers import StoreOffers
from paceline.weights.store.version_source import VersionSource, WholeSlices
from paceline.weights.store.writer import StoreWriter


class DeltaChannel(WeightChannel):
    """A `WeightChannel` for all ranks except rank 0. They only write their slices."""

    def __init__(self, writer: StoreWriter, dtype: torch.dtype, *, on_device: bool = True) -> None:
        """`on_device`: keep a copy on the GPU, if one fits now, to compare the next version with."""
        self._writer = writer
        self._on_device = on_device
        self._dtype = dtype
        self._tensors: tuple[TensorPlan, ...] = ()
        self._snapshot: DeviceSnapshot | None = None

    @property
    def wants_snapshot(self) -> bool:
        self._writer.check()
        return False

    def publish(self, version: Version, model: nn.Module) -> None:
        """Publish the weights. The call takes as long as copying this rank's slices, or comparing them on its GPU."""
        if not self._tensors:
            self._tensors = plan_tensors(model, self._dtype)
            snapshot_here = DeviceSnapshot(model, self._dtype)
            self._snapshot = snapshot_here if self._on_device and snapshot_here.fits() else None
        snapshot = self._snapshot

        def take(replaced: VersionSource | None) -> VersionSource:
            started_s = time.perf_counter()
            source = snapshot.take(replaced) if snapshot is not None else WholeSlices(local_slices(model, self._dtype))
            self._copied(version, time.perf_counter() - started_s)
            return source

        self._writer.take(version, take, self._tensors)

    def write_snapshot(self) -> None:
        self._writer.put_snapshot()

    def close(self) -> None:
        self._writer.close()

    def _copied(self, version: Version, copy_s: float) -> None:
        """Note that this rank's slices of the version are copied but not yet written."""


class Rank0DeltaChannel(DeltaChannel):
    """The channel on rank 0, with offers. It calls `announce(version, copy_s)` before a member can have a version."""

    def __init__(
        self,
        writer: StoreWriter,
        offers: StoreOffers,
        dtype: torch.dtype,
        announce: Callable[[Version, float], None],
        *,
        on_device: bool = True,
    ) -> None:
        super().__init__(writer, dtype, on_device=on_device)
        self._offers = offers
        self._announce = announce

    @property
    def wants_snapshot(self) -> bool:
        self._writer.check()
        return self._offers.wants_snapshot

    def write_snapshot(self) -> None:
        self._offers.snapshot_ordered()
        self._writer.put_snapshot()

    def set_members(self, epoch: int, member_ids: Sequence[str], by_host: Collection[str] = ()) -> None:
        self._offers.set_members(epoch, member_ids)

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        self._offers.answer(member_id, version, ok, message, damaged)

    def progress(self, member_id: str, version: Version, received_bytes: int = 0, loading: bool = False) -> None:
        self._offers.progress(member_id)

    def interrupt(self, reason: str) -> None:
        self._offers.interrupt()

    def close(self) -> None:
        self._offers.close()
        super().close()

    def _copied(self, version: Version, copy_s: float) -> None:
        self._announce(version, copy_s)
