"""Extension of vLLM's worker processes: it reads new weights, and loads them while generation is paused.

vLLM imports this module in every worker, because it is named as `worker_extension_cls`, and that registers the weight
transfer. An update has two parts. `paceline_read_weights` maps the weights and verifies this worker's part on a thread,
while the worker goes on decoding. Then, between `start_weight_update` and `finish_weight_update`, everything that was
read is loaded at once, each worker taking its part of the tensors. So no step that can fail from outside happens while
the model has parts of two versions.

A reader maps a segment once and compares its part of each version's checksums; the others compare the rest. A segment stays
mapped for the versions after, the two last ones at most, and on a GPU those of its pages that this worker loads stay locked,
so that a later version is loaded at the speed of the bus.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from paceline.rollout.vllm.receipts import ReadOrder, receipt_of, write_failure, write_receipt
from paceline.weights.host_segment import HostSegment, identity_of
from paceline.weights.manifest import WeightManifest
from paceline.weights.packing import views
from paceline.weights.segment_pair import MAX_SEGMENTS
from paceline.weights.verification import Check, pieces_of, share_of


@dataclass(frozen=True)
class ReadWeights:
    """A version that a worker has mapped and whose part it has verified."""

    tensors: Mapping[str, Tensor]
    layout_hash: str


class SegmentReader:
    """Reader number `reader` of an engine. `load` runs on the worker's own thread, `read` on others."""

    def __init__(self, reader: int, device: torch.device) -> None:
        self._reader = reader
        self._on_gpu = device.type == "cuda"
        self._lock = threading.Lock()
        self._mapped: OrderedDict[tuple[int, int], HostSegment] = OrderedDict()
        self._layout = ""
        self._part: list[tuple[int, int]] = []
        """Byte ranges that this worker loads of weights with `_layout`."""
        self._record: LoadRecord | None = None
        """While the first version of a layout is loaded."""
        self.loaded_bytes = 0
        """Bytes of a version that this worker loads; 0 before the first."""

    def read(self, order: ReadOrder, take: Callable[[ReadWeights], None]) -> None:
        """Map and verify, give the weights to `take`, and then write the receipt: whoever sees it can rely on `take` having
        returned. An error is written too, and raised."""
        try:
            manifest = WeightManifest.from_bytes(order.manifest)
            segment = self._segment(order.segment)
            if self._on_gpu and manifest.layout_hash == self._layout and self._part:
                segment.page_lock(self._part)
            flat = segment.flat()[: manifest.total_bytes]
            share = share_of(pieces_of(manifest), self._reader, order.num_readers)
            with (
                segment.reading(order.generation),
                Check(flat, manifest, share, digests=order.digests) as check,
            ):
                check.finish()
            take(ReadWeights(views(flat, manifest), manifest.layout_hash))
        except BaseException as error:
            write_failure(order.receipts, self._reader, order.number, error)
            raise
        receipt = receipt_of(manifest.content_hash, order.number, self._reader)
        write_receipt(order.receipts, self._reader, receipt, order.number, check.num_bytes)

    def load(self, model: Any, weights: ReadWeights) -> None:
        """Load this worker's part into `model`; `finish` follows."""
        if self._layout != weights.layout_hash:
            self._layout, self._record = weights.layout_hash, LoadRecord(next(iter(weights.tensors.values())))
        with self._record or nullcontext():
            model.load_weights(iter(weights.tensors.items()))

    def finish(self, finalize: Callable[[], None]) -> None:
        """Call `finalize`, which loads what vLLM has put off. With the first version of a layout, note what was loaded."""
        with self._record or nullcontext():
            finalize()
        if self._record is not None:
            self._part, self.loaded_bytes, self._record = self._record.ranges, self._record.num_bytes, None

    def _segment(self, path: str) -> HostSegment:
        """Return the segment at `path`, mapped before where it is the same memory."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            identity = identity_of(fd)
        finally:
            os.close(fd)
        with self._lock:
            if identity not in self._mapped:
                self._mapped[identity] = HostSegment.open(path)
            self._mapped.move_to_end(identity)
            while len(self._mapped) > MAX_SEGMENTS:
                self._mapped.popitem(last=False)[1].close()
            return self._mapped[identity]


class LoadRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which bytes of the memory behind `tensor` are copied into a model's tensors."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = tensor.untyped_storage().data_ptr()
        self.ranges: list[tuple[int, int]] = []
        """Byte ranges [start, end) from the first to the last byte of each copy."""
        self.num_bytes = 0
        """Bytes that were copied."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation; of a copy from the memory into a real tensor note the source."""
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:
            self._note(args[1])
        elif func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self._note(args[0])
        return func(*args, **(kwargs or {}))

    def _note(self, source: Tensor) -> None:
        if source.device.type != "cpu" or source.untyped_storage().data_ptr() != self._storage:
            return
        if not source.numel():
            return
        start = int(source.storage_offset()) * source.itemsize
        last = sum(
            (size - 1) * int(stride) for size, stride in zip(source.shape, source.stride(), strict=True)
        )
        self.ranges.append((start, start + (last + 1) * source.itemsize))
        self.num_bytes += source.nbytes


BACKEND = "paceline"
"""Name of the transfer within vLLM."""


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the transfer needs no preparation."""


@dataclass
class LoadRead(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Order to load the weights that `paceline_read_weights` has read."""


class SegmentTransfer(WeightTransferEngine[NoInit, LoadRead]):  # type: ignore[misc]
    """The weight transfer, see the module."""

    init_info_cls = NoInit
    update_info_cls = LoadRead
    reader: SegmentReader | None = None
    """Made with the first order, which knows the worker's number."""

    def read(self, order: ReadOrder, reader: int) -> None:
        """Begin to map and verify; the outcome is in `receive_weights` as soon as the receipt is written."""
        if self.reader is None:
            self.reader = SegmentReader(reader, self.device)
        self._weights: Future[ReadWeights] = Future()

        def run(reader: SegmentReader, outcome: Future[ReadWeights]) -> None:
            try:
                reader.read(order, outcome.set_result)
            except BaseException as error:
                if not outcome.done():
                    outcome.set_exception(error)

        threading.Thread(
            target=run, args=(self.reader, self._weights), name="paceline-weights", daemon=True
        ).start()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Put every layer into the state in which a checkpoint's tensors can be loaded."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: LoadRead) -> None:
        """Load this worker's part of every tensor. The receipts came first, so they are there."""
        weights = self._weights.result(timeout=0)
        del self._weights
        assert self.reader is not None
        self.reader.load(self.model, weights)

    def finish_weight_update(self) -> None:
        """Bring the layers back into the form that the kernels use."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        assert self.reader is not None
        self.reader.finish(lambda: finalize_layerwise_reload(self.model, self.model_config))

    def shutdown(self) -> None:
        """Do nothing: mappings end with the process."""


class WorkerExtension:
    """Mixed into vLLM's worker class; its methods are called through `collective_rpc`."""

    rank: int
    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: SegmentTransfer

    def paceline_make_stage_buffers(self) -> None:
        """Make the memory in which a later pipeline stage takes the earlier one's output. vLLM makes it in its warm-up,
        which it skips on a CPU without compilation."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def paceline_read_weights(self, **order: Any) -> None:
        """Begin to read, see `ReadOrder`; readers count through the replicas of data parallelism."""
        parallel = self.vllm_config.parallel_config
        reader = parallel.data_parallel_index * parallel.world_size + self.rank
        self.weight_transfer_engine.read(ReadOrder(**order), reader)

    def paceline_loaded_bytes(self) -> int:
        """Return the bytes that this worker loads of a version; 0 before the first."""
        reader = self.weight_transfer_engine.reader
        return reader.loaded_bytes if reader is not None else 0


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SegmentTransfer)
