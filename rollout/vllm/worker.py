"""Extension of vLLM's worker processes: it reads new weights, and loads them while generation is paused.

vLLM imports this module in every worker, because it is named as `worker_extension_cls`, and that registers the weight
transfer. An update has two parts. `paceline_read_weights` maps and verifies the shared memory on a thread, while the
worker goes on decoding. Then, between `start_weight_update` and `finish_weight_update`, everything that was read is
loaded at once, each worker taking its part of the tensors. So no step that can fail from outside happens while the
model has parts of two versions.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rollout.vllm.shared_weights import read_shared

BACKEND = "paceline"
"""Name of the transfer within vLLM."""


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the transfer needs no preparation."""


@dataclass
class ReadWeights(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Order to load the weights that `paceline_read_weights` has read."""


class SharedMemoryTransfer(WeightTransferEngine[NoInit, ReadWeights]):  # type: ignore[misc]
    """The weight transfer, see the module."""

    init_info_cls = NoInit
    update_info_cls = ReadWeights

    def read(self, path: str, manifest: bytes, reader: int) -> None:
        """Begin to map and verify; the outcome is in `receive_weights` as soon as the receipt is written."""
        self._tensors: Future[Mapping[str, torch.Tensor]] = Future()

        def run(outcome: Future[Mapping[str, torch.Tensor]]) -> None:
            try:
                read_shared(path, manifest, reader, outcome.set_result)
            except BaseException as error:
                if not outcome.done():
                    outcome.set_exception(error)

        threading.Thread(target=run, args=(self._tensors,), name="paceline-weights", daemon=True).start()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Put every layer into the state in which a checkpoint's tensors can be loaded."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ReadWeights) -> None:
        """Load this worker's part of every tensor. The receipts came first, so they are there."""
        tensors = self._tensors.result(timeout=0)
        del self._tensors
        self.model.load_weights(iter(tensors.items()))

    def finish_weight_update(self) -> None:
        """Bring the layers back into the form that the kernels use."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: no resource is held."""


class WorkerExtension:
    """Mixed into vLLM's worker class; its methods are called through `collective_rpc`."""

    rank: int
    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: SharedMemoryTransfer

    def paceline_make_stage_buffers(self) -> None:
        """Make the memory in which a later pipeline stage takes the earlier one's output. vLLM makes it in its warm-up, which
        it skips on a CPU without compilation.
        """
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def paceline_read_weights(self, path: str, manifest: bytes) -> None:
        """Begin to read; readers count through the replicas of data parallelism."""
        parallel = self.vllm_config.parallel_config
        reader = parallel.data_parallel_index * parallel.world_size + self.rank
        self.weight_transfer_engine.read(path, manifest, reader)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
